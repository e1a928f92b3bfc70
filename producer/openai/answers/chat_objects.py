"""Objects of chat completions: the response, and the chunks of a stream."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from .common import OpenAIFinishReason, Usage
from .logprobs import ChatLogprobs


class FunctionCall(msgspec.Struct):
    """The called function. ``arguments`` is JSON as the model wrote it; truncated if the answer is."""

    name: str
    arguments: str


class CustomCall(msgspec.Struct):
    """The called custom tool, and its input."""

    name: str
    input: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call, which has the part that its type names. The message with its result refers to ``id``."""

    id: str
    type: Literal["function", "custom"]
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET


class FunctionCallDelta(msgspec.Struct, kw_only=True):
    """The part of a call that a chunk adds. The first one has the whole name."""

    name: str | UnsetType = UNSET
    arguments: str


class CustomCallDelta(msgspec.Struct, kw_only=True):
    """The part of a custom tool's call that a chunk adds. The first one has the whole name."""

    name: str | UnsetType = UNSET
    input: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """The part of the ``index``-th call that a chunk adds. The first one has ``id`` and ``type``."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionCallDelta | UnsetType = UNSET
    custom: CustomCallDelta | UnsetType = UNSET


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The answer. ``content`` is null if it has only tool calls. ``refusal`` is always null, since no model here fills
    it.

    ``reasoning`` is vLLM's name and ``reasoning_content`` DeepSeek's for the same text; both are set.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """An answer out of ``n``. ``stop_reason`` is vLLM's: the string or token id that stopped it, unless it was the
    end of sequence."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: OpenAIFinishReason
    stop_reason: int | str | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The response."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str


class MessageDelta(msgspec.Struct, kw_only=True):
    """The part of the message that a chunk adds. The first chunk of each choice has ``role``."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """The part of one choice that a chunk adds."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | UnsetType | None = UNSET
    finish_reason: OpenAIFinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """An event of a stream. The event with ``usage`` has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str
