"""Chat messages as in a body, and as a chat template expects them; checks of their tool calls and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...shared.errors import ValidationError
from ...shared.params.chat import TEXT_TYPES
from ...shared.values.shown import shown
from .errors import bad_field
from .tools.custom import called

_PASSED_ON = ("name", "tool_call_id", "reasoning", "reasoning_content")


class ImageURL(msgspec.Struct):
    """URL of an image. ``detail`` is accepted but ignored, since each model has its own image sizes."""

    url: str
    detail: str | None = None


class ContentPart(msgspec.Struct):
    """A part of a message's content: a text, or an image as a URL. Other parts are refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageURL | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """A message. Other fields that a template needs are passed by ``chat_template_kwargs``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | UnsetType | None = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType | None = UNSET
    tool_call_id: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    refusal: str | UnsetType | None = UNSET


def template_messages(messages: Sequence[ChatMessage], *, keeps_developer: bool = False) -> list[dict[str, Any]]:
    """Return the messages with text or parts as content.

    Several parts are passed unchanged, because only the worker knows whether the chat template iterates over parts or
    needs one text. System messages stay where they are, because the worker knows where the template takes them.

    Args:
        keeps_developer: whether the template knows OpenAI's role "developer". If not, it becomes "system".

    Raises:
        OpenAIError: 400, there is no message, one has no content, or a part is neither text nor image.
    """
    if not messages:
        raise bad_field("messages", "messages must hold at least one message")
    template_messages = [_template_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    for message in template_messages:
        if message["role"] == "developer" and not keeps_developer:
            message["role"] = "system"
    return template_messages


def _template_message(path: str, message: ChatMessage) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = _contents([_content_part(f"{path}.content[{i}]", part) for i, part in enumerate(content)])
    if content is None and message.refusal:
        content = message.refusal
    if message.role == "tool" or (message.role == "assistant" and not message.tool_calls):
        content = content or ""  # null is a result without output, or an answer without text
    if content is None and message.role != "assistant":
        raise bad_field(f"{path}.content", f"{path}.content must be text, got null")
    template_message: dict[str, Any] = {"role": message.role, "content": content}
    if message.role == "tool":
        check_tool_result(message.tool_call_id, f"{path}.tool_call_id")
    for name in _PASSED_ON:
        value = getattr(message, name)
        if value is not UNSET and value is not None:
            template_message[name] = value
    if message.tool_calls:
        template_message["tool_calls"] = read_tool_calls(message.tool_calls, f"{path}.tool_calls")
    return template_message


def _contents(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the text of a single text part, else the parts."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _content_part(path: str, part: ContentPart) -> dict[str, Any]:
    if part.type != "image_url":
        return {"type": "text", "text": _text_part(path, part)}
    if part.image_url is None:
        raise bad_field(f"{path}.image_url", f"{path}.image_url must be given, as {{'url': ...}}")
    return {"type": "image_url", "image_url": {"url": part.image_url.url}}


def _text_part(path: str, part: ContentPart) -> str:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type not in TEXT_TYPES:
        raise bad_field(
            f"{path}.type",
            f"{path}.type {shown(part.type)} is not supported; pass parts of type 'text' or 'image_url'",
            code="unsupported_content_type",
        )
    if part.text is None:
        raise bad_field(f"{path}.text", f"{path}.text must be given")
    return part.text


def read_tool_calls(calls: Sequence[object], field: str) -> list[Mapping[str, Any]]:
    """Return the calls of an assistant's message, those of custom tools as calls of the functions they are shown as.

    Arguments may be any text, since models also write invalid JSON.

    Raises:
        ValidationError: a call is incomplete; names the field.
    """
    return [_read_tool_call(call, f"{field}[{position}]") for position, call in enumerate(calls)]


def _read_tool_call(call: object, place: str) -> Mapping[str, Any]:
    if not isinstance(call, Mapping):
        raise ValidationError(f"{place} must be an object, got {shown(call)}")
    kind = call.get("type", "function")
    if kind not in ("function", "custom"):
        raise ValidationError(f"{place}.type must be 'function' or 'custom', got {shown(kind)}")
    tool = call.get(kind)
    if not isinstance(tool, Mapping):
        raise ValidationError(f"{place}.{kind} must be an object, got {shown(tool)}")
    for name, value in (("id", call.get("id")), (f"{kind}.name", tool.get("name"))):
        if not isinstance(value, str) or not value:
            raise ValidationError(f"{place}.{name} must be a non-empty string, got {shown(value)}")
    key, form = ("input", "text") if kind == "custom" else ("arguments", "JSON as a string")
    text = tool.get(key)
    if not isinstance(text, str):
        raise ValidationError(f"{place}.{kind}.{key} must be {form}, got {shown(text)}")
    return (
        call if kind == "function" else {"id": call["id"], "type": "function", "function": called(tool["name"], text)}
    )


def check_tool_result(tool_call_id: object, field: str) -> None:
    """Check the id in a tool's message.

    Raises:
        ValidationError: it is missing.
    """
    if not isinstance(tool_call_id, str) or not tool_call_id:
        raise ValidationError(f"{field} must be the id of the call that the message answers, got {shown(tool_call_id)}")
