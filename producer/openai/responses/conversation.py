"""Convert items to the messages that a chat template expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....shared.values.shown import shown
from ..errors import bad_field
from .items import FunctionCall, FunctionCallOutput, InputImage, Item, Message, Reasoning, Refusal

# Chat templates have no role "developer", which is OpenAI's name for "system".
_ROLES = {"developer": "system"}


def chat_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the conversation as chat messages.

    Reasoning, text and calls of one turn of the model form one message of the assistant. System messages at the start
    are joined, since most templates accept only one.

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
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    return messages


def _add_message(messages: list[dict[str, Any]], message: Message) -> None:
    role = _ROLES.get(message.role, message.role)
    if not isinstance(message.content, str) and any(isinstance(part, InputImage) for part in message.content):
        messages.append({"role": _check_image_role(role), "content": [_part(part) for part in message.content]})
        return
    text = _text(message.content)
    if role == "assistant":
        turn = _turn(messages, for_text=True)
        turn["content"] = text
    elif role == "system" and messages and all(earlier["role"] == "system" for earlier in messages):
        messages[-1]["content"] += "\n\n" + text
    else:
        messages.append({"role": role, "content": text})


def _check_image_role(role: str) -> str:
    if role != "user":
        raise bad_field(
            "input", f"input: only messages of the role 'user' may have parts of type input_image, got {role}"
        )
    return role


def _part(part: Any) -> dict[str, Any]:
    if not isinstance(part, InputImage):
        return {"type": "text", "text": _text([part])}
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


def _text(content: str | Sequence[Any]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)
