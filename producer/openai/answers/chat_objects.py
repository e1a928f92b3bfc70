"""What chat completions answer with: the response, and the chunks of a stream."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from .ends import OpenAIFinishReason
from .logprobs import ChatLogprobs
from .usage import Usage


class FunctionCall(msgspec.Struct):
    """``arguments`` are JSON as the model wrote it; cut short if the answer is."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call; ``id`` is what the message with its result names."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to a call: the name comes whole, with the first."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to the ``index``-th call; ``id`` and ``type`` come with the first."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The answer; ``content`` is null if it is tool calls alone. Nothing here refuses, so ``refusal`` is null.

    ``reasoning`` is vLLM's word for what ``reasoning_content`` is DeepSeek's; both are given.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One of the ``n`` answers. ``stop_reason`` is vLLM's: what stopped it, if it was no end of sequence."""

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
    """What a chunk adds to the message; ``role`` comes with the first of each choice."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """What a chunk adds to one choice."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | UnsetType | None = UNSET
    finish_reason: OpenAIFinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a stream; that with ``usage`` has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str
