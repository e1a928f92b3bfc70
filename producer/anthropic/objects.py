"""Objects of the Messages API: the response with its content blocks, and the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning before the answer. The signature has no meaning, but programs expect one."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool that the caller runs."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct):
    """``thinking_tokens``: part of the output tokens that are reasoning, estimated by its share of the text."""

    thinking_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Token counts. ``input_tokens`` are those that were not cached, so all three input counts are the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    service_tier: Literal["standard"] = "standard"


class Message(msgspec.Struct, kw_only=True):
    """The response."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None = None
    container: None = None
    usage: Usage


class TokensCount(msgspec.Struct):
    """The response of count_tokens."""

    input_tokens: int


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """First event. ``message`` has no content and no stop reason yet."""

    message: Message


class BlockStart(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_start"):
    """Start of a block, which is empty."""

    index: int
    content_block: Block


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """More reasoning."""

    thinking: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """More of the JSON of a call's input."""

    partial_json: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """Last delta of a thinking block."""

    signature: str


class BlockDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_delta"):
    """Addition to the open block."""

    index: int
    delta: TextDelta | ThinkingDelta | InputDelta | SignatureDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """End of the open block."""

    index: int


class EndDelta(msgspec.Struct, kw_only=True):
    """Fields of the message that the end sets."""

    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


class MessageDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="message_delta"):
    """End of the message. ``usage`` has totals."""

    delta: EndDelta
    usage: Usage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """Last event."""


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
