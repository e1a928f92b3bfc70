"""Chats: the content of their messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from ..errors import UnsupportedParameterError, ValidationError
from ..values.checks import check_encodable, check_text
from ..values.shown import shown

TEXT_TYPES = ("text", "input_text", "output_text")
REFUSAL = "refusal"
# The place of an image, which goes beside the messages.
IMAGE = "image"
# Instead of a name: the parser that fits the model's chat template, and none.
AUTO, NONE = "auto", "none"


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for a worker, the parts of a content as ``{"type": "text", "text": ...}``.

    Raises:
        ValidationError: a message has no role or content, or a value that cannot be sent; names the field.
        UnsupportedParameterError: a part is no text.
    """
    return [_checked_message(f"messages[{position}]", message) for position, message in enumerate(messages)]


def joined(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return checked parts as one text, a line each, as vLLM does for templates that take strings.

    Raises:
        UnsupportedParameterError: one is an image, whose place such a template would not write.
    """
    if any(part["type"] == IMAGE for part in parts):
        raise UnsupportedParameterError(
            "messages: the model's chat template has no places for images; send a text prompt with the model's own "
            "placeholders"
        )
    return "\n".join(part["text"] for part in parts)


def is_parts(content: object) -> TypeGuard[list[dict[str, str]]]:
    """Whether ``content`` is checked parts: the answer of a tool may be another list."""
    return isinstance(content, list) and all(
        isinstance(part, Mapping)
        and (part == {"type": IMAGE} or (part.get("type") == "text" and isinstance(part.get("text"), str)))
        for part in content
    )


def _checked_message(field: str, message: Mapping[str, Any]) -> dict[str, Any]:
    # OpenAI's assistant messages that call tools may have no content.
    if not isinstance(message, Mapping) or not message.keys() & {"content", "tool_calls"}:
        description = f"keys {shown(list(message))}" if isinstance(message, Mapping) else shown(message)
        raise ValidationError(f"{field} must have a 'role' (a string) and a 'content', got {description}")
    if not isinstance(message.get("role"), str):
        raise ValidationError(f"{field}.role must be a string, got {shown(message.get('role'))}")
    check_text(f"{field}.role", message["role"])
    checked = dict(message)
    if "content" in message:
        checked["content"] = _content(f"{field}.content", message["content"], message["role"])
    for name in message.keys() - {"role", "content"}:
        check_text(f"a key of {field}", name)
        check_encodable(f"{field}.{name}", message[name])
    return checked


def _content(field: str, content: Any, role: str) -> Any:
    if isinstance(content, str):
        return check_text(field, content)
    if content is None:
        return None
    if role == "tool" and _is_data(content):
        check_encodable(field, content)
        return content
    if not isinstance(content, list | tuple):
        raise ValidationError(f"{field} must be text or a list of text parts, got {shown(content)}")
    return [_checked_part(f"{field}[{position}]", part) for position, part in enumerate(content)]


def _is_data(content: object) -> bool:
    """Whether it is the result of a tool, and not parts: templates write it as JSON."""
    is_list = isinstance(content, list)
    return isinstance(content, dict) or (is_list and not all(isinstance(i, Mapping) and "type" in i for i in content))


def _checked_part(field: str, part: Any) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise ValidationError(f"{field} must be a part such as {{'type': 'text', 'text': ...}}, got {shown(part)}")
    if kind == IMAGE and len(part) == 1:
        return {"type": IMAGE}
    name = REFUSAL if kind == REFUSAL else "text"
    if name != REFUSAL and kind not in TEXT_TYPES:
        raise UnsupportedParameterError(f"{field}.type {shown(kind)} is not supported here; pass parts of type 'text'")
    return {"type": "text", "text": check_text(f"{field}.{name}", part.get(name))}


def num_thought(token_ids: list[int], start: int, end: int) -> int | None:
    """Return how many tokens follow the last ``start``; None if there is none, or an ``end`` follows it."""
    backwards = token_ids[::-1]
    if start not in backwards:
        return None
    num_tokens = backwards.index(start)
    return None if end in backwards[:num_tokens] else num_tokens
