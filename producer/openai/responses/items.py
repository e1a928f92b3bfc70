"""Items of a response's input and output, with OpenAI's names, read from the ``input`` of a body."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ....shared.values.shown import shown
from ..errors import OpenAIError, bad_field, error_of

_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_(?:in)?[0-9]+")
ItemStatus = Literal["in_progress", "completed", "incomplete"]
_REFERENCE = "item_reference"
_TYPES = (
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "custom_tool_call",
    "custom_tool_call_output",
    "tool_search_call",
    "tool_search_output",
    _REFERENCE,
)
# Items of tools that OpenAI's servers run, and of features that are not offered here. The model never sees them.
_DROPPED = frozenset(
    [
        "additional_tools",
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "compaction",
        "compaction_summary",
        "compaction_trigger",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "web_search_call",
    ]
)


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
    """A model's call of a function that the caller runs; ``arguments`` is JSON as the model wrote it.

    ``namespace`` is that of a function that was offered within one.
    """

    id: str | None = None
    call_id: str
    name: str
    arguments: str
    status: ItemStatus | None = None
    namespace: str | UnsetType | None = UNSET


class FunctionCallOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call_output"):
    """The result of the function call ``call_id``."""

    id: str | None = None
    call_id: str
    output: str | list[InputText | InputImage | OutputText]
    status: ItemStatus | None = None


class CustomToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A model's call of a custom tool, whose ``input`` is plain text. ``namespace`` is as in ``FunctionCall``."""

    id: str | None = None
    call_id: str
    name: str
    input: str
    status: ItemStatus | None = None
    namespace: str | UnsetType | None = UNSET


class CustomToolCallOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call_output"):
    """The result of the custom tool's call ``call_id``."""

    id: str | None = None
    call_id: str
    output: str | list[InputText | InputImage | OutputText]
    status: ItemStatus | None = None


class ToolSearchCall(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_search_call"):
    """A model's search for tools that the caller runs. ``arguments`` is text if the model wrote no valid JSON."""

    id: str | None = None
    call_id: str
    arguments: Any = None
    execution: str = "client"
    status: ItemStatus | None = None


class ToolSearchOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_search_output"):
    """The tools that the search ``call_id`` found. The model may call them from then on."""

    id: str | None = None
    call_id: str
    tools: list[dict[str, Any]] = []
    execution: str = "client"
    status: ItemStatus | None = None


class Reasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of a model before its answer. ``encrypted_content`` from elsewhere is accepted but ignored."""

    id: str | None = None
    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: ItemStatus | None = None


Item = (
    Message
    | FunctionCall
    | FunctionCallOutput
    | Reasoning
    | CustomToolCall
    | CustomToolCallOutput
    | ToolSearchCall
    | ToolSearchOutput
)
ItemOutput = FunctionCallOutput | CustomToolCallOutput | ToolSearchOutput
_ID_PREFIX = {
    Message: "msg",
    FunctionCall: "fc",
    FunctionCallOutput: "fco",
    Reasoning: "rs",
    CustomToolCall: "ctc",
    CustomToolCallOutput: "ctco",
    ToolSearchCall: "tsc",
    ToolSearchOutput: "tso",
}


def item_id(kind: type[Item], response_id: str, index: int | str) -> str:
    """Return the id of an item of a response. It is derived from its position, so it is the same in every reading."""
    return f"{_ID_PREFIX[kind]}_{response_id[len('resp_') :]}_{index}"


def response_of_item(item_id: str) -> str | None:
    """Return the id of the response that an item's id belongs to; None if ``item_id`` did not create it."""
    match = _ITEM_ID.fullmatch(item_id)
    return None if match is None else f"resp_{match[1]}"


def read_items(
    value: str | list[Any] | None, response_id: str, referenced: Mapping[str, Item] | None = None
) -> list[Item]:
    """Return the items of an input. Each gets an id, and contents become lists of parts.

    Args:
        referenced: the items that references name, by id.

    Raises:
        OpenAIError: 400, an item has an invalid form or an unsupported type, or a referenced item is unknown; its field
            is named.
    """
    if value is None:
        return []
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return [
        _completed(_item(i, item, referenced or {}), f"in{i}", response_id)
        for i, item in enumerate(value)
        if _type_of(item) not in _DROPPED
    ]


def referenced_ids(value: str | list[Any] | None) -> list[str]:
    """Return the ids that the references of an input name."""
    items = value if isinstance(value, list) else []
    ids = [item.get("id") for item in items if _type_of(item) == _REFERENCE]
    return [item_id for item_id in ids if isinstance(item_id, str)]


def ignored_items(value: Any) -> list[str]:
    """Return the paths of the types of items that are not passed to the model."""
    items = value if isinstance(value, list) else []
    return list(dict.fromkeys(f"input.{kind}" for item in items if (kind := _type_of(item)) in _DROPPED))


def _type_of(value: Any) -> str | None:
    """Return the type of an item, also of one that leaves it out; None if it has none."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind is None:
        # The AI SDK leaves the type of a reference out.
        return "message" if "role" in value else _REFERENCE if value.keys() == {"id"} else None
    return kind if isinstance(kind, str) else None


def _item(i: int, value: Any, referenced: Mapping[str, Item]) -> Item:
    if not isinstance(value, dict):
        raise bad_field(f"input[{i}]", f"input[{i}] must be an item, an object, got {type(value).__name__}")
    kind = _type_of(value)
    if kind not in _TYPES:
        raise bad_field(
            f"input[{i}].type",
            f"input[{i}].type must be one of {', '.join(_TYPES)}, got {shown(value.get('type'))}",
            code="unsupported_item_type",
        )
    if kind == _REFERENCE:
        return _referenced(f"input[{i}].id", value.get("id"), referenced)
    try:
        return msgspec.convert(value | {"type": kind}, Item)
    except msgspec.ValidationError as error:
        raise _error_in_item(f"input[{i}]", error_of(error)) from error


def _referenced(path: str, item_id: Any, referenced: Mapping[str, Item]) -> Item:
    item = referenced.get(item_id) if isinstance(item_id, str) else None
    if item is None:
        raise bad_field(
            path,
            f"{path} {shown(item_id)} is unknown, or its response has expired or was not stored; send the item itself",
            code="item_not_found",
        )
    return copy.copy(item)


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
        case _:
            item.status = item.status or "completed"
    return item
