"""Content blocks of a request's messages, and their translation to chat messages.

Programs send blocks of new types with every release. So all blocks have one form, and a block without a meaning for the
model is dropped: results of Anthropic's own tools, redacted thinking, and types that are unknown here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from ...shared.values.shown import shown
from ..openai.errors import bad_field, error_of
from ..openai.messages import ChatMessage, ContentPart, ImageURL

# Claude Code puts a line with a counter into its system prompt, which would change the prefix with every request.
_BILLING = "x-anthropic-billing-header:"

# Types of blocks with a meaning.
_KINDS = frozenset(
    (
        "document", "image", "search_result", "text", "thinking", "tool_addition", "tool_reference", "tool_removal",
        "tool_result", "tool_use",
    )
)  # fmt: skip


class Source(msgspec.Struct, kw_only=True):
    """Content of an image or document: base64 with its media type, a URL, text, or blocks."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: str | list[Any] | None = None


class ToolChange(msgspec.Struct, kw_only=True):
    """The tool that an addition or removal names."""

    name: str | None = None


class Block(msgspec.Struct, kw_only=True):
    """A block of any type. ``source`` of a search result is text, ``content`` of a tool's result text or blocks."""

    type: str
    text: str | None = None
    thinking: str | None = None
    source: Source | str | None = None
    title: str | None = None
    context: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: Any = None
    tool: ToolChange | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ChatMessages(msgspec.Struct):
    """The conversation as chat messages, and for each of them the field of the body from which it comes."""

    messages: list[ChatMessage] = []
    fields: list[str] = []

    def append_message(self, field: str, message: ChatMessage) -> None:
        """Append a message. Consecutive ones of the user, or of the assistant, become one, as in Anthropic's API."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != message.role or message.role not in ("user", "assistant"):
            self.messages.append(message)
            self.fields.append(field)
            return
        assert isinstance(last.content, list)
        assert isinstance(message.content, list)
        last.content = last.content + message.content
        if message.tool_calls:
            last.tool_calls = [*(last.tool_calls or ()), *message.tool_calls]
        if message.reasoning:
            last.reasoning = f"{last.reasoning or ''}{message.reasoning}"


def chat_messages(system: str | Sequence[Block] | None, messages: Sequence[InputMessage]) -> ChatMessages:
    """Return the conversation as chat messages.

    Raises:
        OpenAIError: 400, a block cannot be given to the model; its field is named.
    """
    if not messages:
        raise bad_field("messages", "messages must hold at least one message")
    chat = ChatMessages()
    if instructions := _instructions(system):
        chat.append_message("system", ChatMessage(role="system", content=instructions))
    for i, message in enumerate(messages):
        field, content = f"messages[{i}]", message.content
        blocks = [Block(type="text", text=content)] if isinstance(content, str) else content
        if message.role == "system":
            if text := "\n\n".join(part.text or "" for part in _parts_of_blocks(blocks, field) if part.type == "text"):
                chat.append_message(field, ChatMessage(role="system", content=text))
        elif message.role == "assistant":
            chat.append_message(field, _reply(blocks, field))
        else:
            _add_of_user(chat, blocks, field)
    if not chat.messages:
        raise bad_field("messages", "messages must hold a message that is not empty")
    if chat.messages[-1].role == "assistant":
        raise bad_field(
            "messages",
            "messages must not end with a message of the assistant: its answer cannot be prefilled here; describe the "
            "form of the answer, or use output_config.format",
        )
    return chat


def dropped_kinds(messages: Sequence[InputMessage]) -> list[str]:
    """Return the types of blocks that have no meaning for the model, also within results of tools."""
    blocks = [block for message in messages if isinstance(message.content, list) for block in message.content]
    inner = [item for block in blocks if isinstance(block.content, list) for item in block.content]
    kinds = [block.type for block in blocks] + [item.get("type") for item in inner if isinstance(item, dict)]
    return [kind for kind in kinds if isinstance(kind, str) and kind not in _KINDS]


def referenced_tools(messages: Sequence[InputMessage]) -> tuple[set[str], set[str]]:
    """Return the names of tools that blocks of the conversation add, and of those that they remove."""
    added: set[str] = set()
    removed: set[str] = set()
    for message in messages:
        for block in _all_blocks(message.content):
            name = block.tool_name if block.type == "tool_reference" else block.tool.name if block.tool else None
            if name is not None and block.type in ("tool_reference", "tool_addition"):
                added.add(name)
                removed.discard(name)
            elif name is not None and block.type == "tool_removal":
                removed.add(name)
                added.discard(name)
    return added, removed


def _all_blocks(content: str | Sequence[Block]) -> Iterator[Block]:
    for block in () if isinstance(content, str) else content:
        yield block
        if block.type == "tool_result" and isinstance(block.content, list):
            yield from _inner_blocks(block.content, "content")


def _instructions(system: str | Sequence[Block] | None) -> str:
    if isinstance(system, str):
        return re.sub(rf"(?m)^{_BILLING}.*\n?", "", system)
    texts = [block.text or "" for block in system or () if block.type == "text"]
    return "\n\n".join(text for text in texts if text and not text.startswith(_BILLING))


def _reply(blocks: Sequence[Block], field: str) -> ChatMessage:
    """Return the assistant's message: reasoning, text and calls."""
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        if block.type != "tool_use":
            continue
        if not isinstance(block.input, dict | None):
            raise bad_field(
                f"{field}.content[{i}].input",
                f"{field}.content[{i}].input must be an object, got {shown(block.input)}",
            )
        arguments = msgspec.json.encode(block.input or {}).decode()
        calls.append({"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}})
    reasoning = "".join(block.thinking or "" for block in blocks if block.type == "thinking")
    return ChatMessage(
        role="assistant",
        content=_texts(*(block.text for block in blocks if block.type == "text")),
        tool_calls=calls or UNSET,
        reasoning=reasoning or UNSET,
    )


def _add_of_user(chat: ChatMessages, blocks: Sequence[Block], field: str) -> None:
    """Add a user's message: the results of tools first, then their images and the other blocks."""
    images: list[ContentPart] = []
    for i, block in enumerate(blocks):
        if block.type == "tool_result":
            place = f"{field}.content[{i}]"
            parts = _result_parts(block, place)
            images += [part for part in parts if part.type != "text"]
            text = "\n".join(part.text or "" for part in parts if part.type == "text")
            chat.append_message(place, ChatMessage(role="tool", tool_call_id=block.tool_use_id or "", content=text))
    parts = images + _parts_of_blocks(blocks, field)
    if parts or not any(block.type == "tool_result" for block in blocks):
        chat.append_message(field, ChatMessage(role="user", content=parts or [ContentPart(type="text", text="")]))


def _result_parts(block: Block, field: str) -> list[ContentPart]:
    content = block.content
    if not isinstance(content, list):
        return [ContentPart(type="text", text=content if isinstance(content, str) else "")]
    return _parts_of_blocks(_inner_blocks(content, f"{field}.content"), field)


def _inner_blocks(content: Sequence[Any], field: str) -> list[Block]:
    try:
        return msgspec.convert(content, list[Block])
    except msgspec.ValidationError as error:
        raise bad_field(field, f"{field}: {error_of(error).message}") from error


def _parts_of_blocks(blocks: Sequence[Block], field: str) -> list[ContentPart]:
    """Return the texts and images of blocks."""
    parts: list[ContentPart] = []
    for i, block in enumerate(blocks):
        place = f"{field}.content[{i}]"
        match block.type:
            case "text":
                parts += _texts(block.text)
            case "image":
                parts.append(_image(block.source, f"{place}.source"))
            case "document":
                parts += _texts(block.title, block.context)
                parts += _document(block.source, f"{place}.source")
            case "search_result":
                parts += _texts(block.title, block.source if isinstance(block.source, str) else None)
                parts += _result_parts(block, place)
            case "tool_reference":
                parts += _texts(block.tool_name)
            case _:
                pass
    return parts


def _texts(*texts: str | None) -> list[ContentPart]:
    return [ContentPart(type="text", text=text) for text in texts if text]


def _image(source: Source | str | None, field: str) -> ContentPart:
    if isinstance(source, Source) and source.type == "base64" and source.data is not None:
        url = f"data:{source.media_type or 'image/png'};base64,{source.data}"
    elif isinstance(source, Source) and source.type == "url" and source.url is not None:
        url = source.url
    else:
        raise bad_field(f"{field}.type", f"{field}.type of an image must be 'base64' or 'url', got {_kind(source)}")
    return ContentPart(type="image_url", image_url=ImageURL(url))


def _document(source: Source | str | None, field: str) -> list[ContentPart]:
    if isinstance(source, Source) and source.type == "text":
        return _texts(source.data)
    if isinstance(source, Source) and source.type == "content" and source.content is not None:
        return _result_parts(Block(type="content", content=source.content), field)
    raise bad_field(
        f"{field}.type",
        f"{field}.type of a document must be 'text' or 'content', got {_kind(source)}: files such as PDF are not read "
        "here; send their text",
    )


def _kind(source: Source | str | None) -> str:
    return shown(source.type if isinstance(source, Source) else source)
