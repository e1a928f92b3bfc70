"""Convert the items of a conversation to chat messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ....shared.values.shown import shown
from ..errors import bad_field
from ..tools.custom import called
from .items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputImage,
    Item,
    ItemOutput,
    Message,
    Reasoning,
    Refusal,
    ToolSearchCall,
    ToolSearchOutput,
)
from .offered_tools import TOOL_SEARCH, flat_name

# Roles of the caller's instructions.
_INSTRUCTIONS = ("system", "developer")
_IMAGE_FOLLOWS = "The image is in the next message."


def chat_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the conversation as chat messages.

    Reasoning, text and calls of one turn of the model form one message of the assistant. System and developer messages
    at the start are joined, since most templates accept only one. Images in outputs of tools follow these outputs in a
    message of the user, because templates accept only text in an output.

    Raises:
        OpenAIError: an output has no preceding call, or an image is at a place where none is allowed.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    call_ids: set[str] = set()
    images: list[dict[str, Any]] = []
    for item in items:
        if images and not isinstance(item, FunctionCallOutput | CustomToolCallOutput | ToolSearchOutput):
            messages.append({"role": "user", "content": images})
            images = []
        match item:
            case Message():
                _add_message(messages, item)
            case Reasoning():
                turn = _turn(messages)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + _reasoning_text(item)
            case FunctionCall() | CustomToolCall() | ToolSearchCall():
                call_ids.add(item.call_id)
                call = {"id": item.call_id, "type": "function", "function": _function(item)}
                _turn(messages).setdefault("tool_calls", []).append(call)
            case FunctionCallOutput() | CustomToolCallOutput() | ToolSearchOutput():
                _check_call(item, call_ids)
                text, more = _output(item)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
                images += more
    if images:
        messages.append({"role": "user", "content": images})
    return messages


def _function(call: FunctionCall | CustomToolCall | ToolSearchCall) -> dict[str, str]:
    """Return the call of the function that the tool was offered as."""
    match call:
        case FunctionCall():
            return {"name": flat_name(call.name, call.namespace or None), "arguments": call.arguments}
        case CustomToolCall():
            return called(flat_name(call.name, call.namespace or None), call.input)
        case ToolSearchCall():
            arguments = call.arguments
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
            return {"name": TOOL_SEARCH, "arguments": text}


def _check_call(output: ItemOutput, call_ids: set[str]) -> None:
    if output.call_id not in call_ids:
        raise bad_field(
            "input",
            f"input: no call with call_id {shown(output.call_id)} precedes its output; "
            "send the call as well, or the previous_response_id of the response that made it",
        )


def _output(item: ItemOutput) -> tuple[str, list[dict[str, Any]]]:
    """Return the text of an output, and its images as parts of a message."""
    if isinstance(item, ToolSearchOutput):
        return json.dumps(item.tools, ensure_ascii=False), []
    if isinstance(item.output, str):
        return item.output, []
    images = [_message_part(part) for part in item.output if isinstance(part, InputImage)]
    texts = [part for part in item.output if not isinstance(part, InputImage)]
    return _joined_text(texts) or (_IMAGE_FOLLOWS if images else ""), images


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
