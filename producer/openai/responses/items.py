"""Items of a response's input and output, with OpenAI's names: from the ``input`` of a body, and to chat messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ....shared.values.shown import shown
from ..errors import OpenAIError, bad_field, error_of

ItemStatus = Literal["in_progress", "completed", "incomplete"]
_TYPES = ("message", "function_call", "function_call_output", "reasoning")
# Roles of the caller's instructions.
_INSTRUCTIONS = ("system", "developer")


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


def chat_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the conversation as chat messages.

    Reasoning, text and calls of one turn of the model form one message of the assistant. System and developer messages
    at the start are joined, since most templates accept only one.

    Raises:
        OpenAIError: an output has no preceding call, or an image is at a place where none is allowed.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    call_ids: set[str] = set()
    for item in items:
        match item:
            case Message():
                _add_message(messages, item)
            case Reasoning():
                turn = _turn(messages)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + _reasoning_text(item)
            case FunctionCall():
                call_ids.add(item.call_id)
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _turn(messages).setdefault("tool_calls", []).append(call)
            case FunctionCallOutput():
                if item.call_id not in call_ids:
                    raise bad_field(
                        "input",
                        f"input: no function_call with call_id {shown(item.call_id)} precedes its output; "
                        "send the call as well, or the previous_response_id of the response that made it",
                    )
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined_text(item.output)})
    return messages


def _add_message(messages: list[dict[str, Any]], message: Message) -> None:
    role = message.role
    if not isinstance(message.content, str) and any(isinstance(part, InputImage) for part in message.content):
        messages.append({"role": _check_image_role(role), "content": [_message_part(part) for part in message.content]})
        return
    text = _joined_text(message.content)
    if role == "assistant":
        turn = _turn(messages, for_text=True)
        turn["content"] = text
    elif role in _INSTRUCTIONS and messages and all(earlier["role"] in _INSTRUCTIONS for earlier in messages):
        messages[-1]["content"] += "\n\n" + text
    else:
        messages.append({"role": role, "content": text})


def _check_image_role(role: str) -> str:
    if role != "user":
        raise bad_field(
            "input", f"input: only messages of the role 'user' may have parts of type input_image, got {role}"
        )
    return role


def _message_part(part: Any) -> dict[str, Any]:
    if not isinstance(part, InputImage):
        return {"type": "text", "text": _joined_text([part])}
    if part.image_url is None:
        raise bad_field(
            "input", "input: a part of type input_image must have image_url; files are not supported as images"
        )
    return {"type": "image_url", "image_url": {"url": part.image_url}}


def _turn(messages: list[dict[str, Any]], *, for_text: bool = False) -> dict[str, Any]:
    """Return the assistant's message to extend: the last one if the next item belongs to it, else a new one."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or (for_text and (last["content"] or "tool_calls" in last)):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _reasoning_text(item: Reasoning) -> str:
    return "".join(part.text for part in item.content or item.summary)


def _joined_text(content: str | Sequence[Any]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)
