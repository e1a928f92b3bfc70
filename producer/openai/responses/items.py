"""Items of a response's input and output, with OpenAI's names; conversion of the ``input`` of a body to items.

Output items can be sent back as input.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ....shared.values.shown import shown
from ..errors import OpenAIError, bad_field, error_of

ItemStatus = Literal["in_progress", "completed", "incomplete"]

_TYPES = ("message", "function_call", "function_call_output", "reasoning")


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """Text written by the caller."""

    text: str


class InputImage(msgspec.Struct, kw_only=True, tag_field="type", tag="input_image"):
    """An image from the caller, as a URL; ``detail`` is accepted but ignored."""

    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text written by a model."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class Refusal(msgspec.Struct, tag_field="type", tag="refusal"):
    """Refusal of a model. It is never generated here, but messages from elsewhere may contain it."""

    refusal: str


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Text of a model's reasoning."""

    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """Summary of a model's reasoning; never generated here."""

    text: str


class Message(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the caller or the model."""

    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    status: ItemStatus | None = None
    content: str | list[InputText | OutputText | Refusal | InputImage]


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A model's call of a function that the caller runs; ``arguments`` is JSON as the model wrote it."""

    id: str | None = None
    call_id: str
    name: str
    arguments: str
    status: ItemStatus | None = None


class FunctionCallOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call_output"):
    """The result of the function call ``call_id``."""

    id: str | None = None
    call_id: str
    output: str | list[InputText]
    status: ItemStatus | None = None


class Reasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of a model before its answer. ``encrypted_content`` from elsewhere is accepted but ignored."""

    id: str | None = None
    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: ItemStatus | None = None


Item = Message | FunctionCall | FunctionCallOutput | Reasoning
_ID_PREFIX = {Message: "msg", FunctionCall: "fc", FunctionCallOutput: "fco", Reasoning: "rs"}


def item_id(kind: type[Item], response_id: str, index: int | str) -> str:
    """Return the id of an item of a response. It is derived from its position, so it is the same in every reading."""
    return f"{_ID_PREFIX[kind]}_{response_id[len('resp_') :]}_{index}"


def read_items(value: str | list[Any] | None, response_id: str) -> list[Item]:
    """Return the items of an input. Each gets an id, and contents become lists of parts.

    Raises:
        OpenAIError: 400, an item has an invalid form or an unsupported type; its field is named.
    """
    if value is None:
        return []
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return [_completed(_item(i, item), f"in{i}", response_id) for i, item in enumerate(value)]


def _item(i: int, value: Any) -> Item:
    if not isinstance(value, dict):
        raise bad_field(f"input[{i}]", f"input[{i}] must be an item, an object, got {type(value).__name__}")
    kind = value.get("type") or ("message" if "role" in value else None)
    if kind not in _TYPES:
        raise bad_field(
            f"input[{i}].type",
            f"input[{i}].type must be one of {', '.join(_TYPES)}, got {shown(kind)}",
            code="unsupported_item_type",
        )
    try:
        return msgspec.convert(value | {"type": kind}, Item)
    except msgspec.ValidationError as error:
        raise _error_in_item(f"input[{i}]", error_of(error)) from error


def _error_in_item(path: str, error: OpenAIError) -> OpenAIError:
    """Return an error about a field of one item as one about a field of the input."""
    param = f"{path}.{error.param}" if error.param else path
    reason = error.message.removeprefix(error.param or "")
    if param.endswith(".type"):
        reason += "; supported types are input_text, input_image, output_text and refusal"
    return bad_field(param, param + (reason if error.param else f": {reason}"), code=error.error_code)


def _completed(item: Item, index: str, response_id: str) -> Item:
    item.id = item.id or item_id(type(item), response_id, index)
    match item:
        case Message():
            if isinstance(item.content, str):
                is_output = item.role == "assistant"
                item.content = [OutputText(item.content) if is_output else InputText(item.content)]
            item.status = "completed"
        case FunctionCall() | FunctionCallOutput() | Reasoning():
            item.status = item.status or "completed"
    return item
