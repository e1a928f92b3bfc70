"""POST /v1/chat/completions: the body, the response and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...shared.messages import Delta, FinishReason
from ..outputs import CompletionOutput, RequestOutput
from .answer_parts import AnswerParser, MessageParts, PlainText
from .common import (
    SYSTEM_FINGERPRINT,
    GenerationBody,
    OpenAIFinishReason,
    Usage,
    UsageCounter,
    created_at,
    finish_reason_of,
    stop_reason_of,
)
from .errors import bad_field
from .logprobs import ChatLogprobs, chat_logprobs
from .messages import ChatMessage, template_messages
from .prepared import Prepared


class ChatCompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """The request. ``max_completion_tokens`` goes before ``max_tokens``; without both the model's length is the limit.

    vLLM's: ``prompt_logprobs`` (vLLM tells them beside the choices, which this API does not; refused),
    ``add_generation_prompt``, ``continue_final_message`` and ``chat_template_kwargs``, for the chat template.
    """

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The answer; ``content`` is null if it is tool calls alone. Nothing here refuses, so ``refusal`` is null."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


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
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


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


class PreparedChat(Prepared, kw_only=True, frozen=True):
    """``make_parser`` tells the text of each answer apart; ``num_top_logprobs`` is None if none are asked for."""

    id_prefix: str = "chatcmpl"
    num_top_logprobs: int | None
    includes_usage: bool
    make_parser: Callable[[], AnswerParser] = PlainText

    def answer(self, *outputs: RequestOutput, response_id: str | None = None) -> ChatCompletion:
        """As ``Prepared.answer``, of one output."""
        (output,) = outputs
        response_id = response_id or output.request_id
        return ChatCompletion(
            id=response_id,
            object="chat.completion",
            created=created_at(response_id),
            model=output.model,
            choices=[self._choice(one) for one in output.outputs],
            usage=Usage.of([] if output.usage is None else [output.usage]),
            system_fingerprint=SYSTEM_FINGERPRINT,
        )

    def events(self, response_id: str, model: str) -> ChatChunks:
        """As ``Prepared.events``."""
        return ChatChunks(self, response_id, model)

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        finish_reason = finish_reason_of(output.finish_reason, has_output=bool(output.token_ids))
        assert finish_reason is not None
        parser = self.make_parser()
        message = whole_message(parser.feed(output.text), parser.finish())
        return ChatChoice(
            index=output.index,
            message=message,
            logprobs=self.logprobs_of(output.logprobs),
            finish_reason=parser.finish_reason(finish_reason),
            stop_reason=stop_reason_of(output.finish_reason, output.stop_reason),
        )

    def logprobs_of(self, tokens: Any) -> ChatLogprobs | None:
        """The log probabilities of some tokens, if the caller asked for them."""
        return None if self.num_top_logprobs is None else chat_logprobs(tokens or (), self.num_top_logprobs)


def whole_message(*parts: MessageParts) -> AssistantMessage:
    """Put together what the text of one answer has said."""
    content = "".join(part.content for part in parts)
    reasoning = "".join(part.reasoning for part in parts)
    tool_calls = [call for part in parts for call in part.tool_calls]
    return AssistantMessage(
        role="assistant",
        refusal=None,
        content=content or (None if tool_calls or reasoning else ""),
        reasoning=reasoning or UNSET,
        tool_calls=tool_calls or UNSET,
    )


class ChatChunks:
    """The chunks of one stream: see ``ChunkMaker``."""

    def __init__(self, prepared: PreparedChat, response_id: str, model: str) -> None:
        self._prepared = prepared
        self._head = (response_id, created_at(response_id), model)
        self._parsers: dict[int, AnswerParser] = {}
        self._usage = UsageCounter()

    def feed(self, delta: Delta, prompt: int = 0) -> ChatCompletionChunk | None:
        parser = self._parsers.get(delta.child)
        is_first = parser is None
        if parser is None:
            parser = self._parsers[delta.child] = self._prepared.make_parser()
        parts = parser.feed(delta.text)
        reason: OpenAIFinishReason | None = None
        if delta.finish_reason is not None:
            reason, parts = self._end_of(delta, delta.finish_reason, parser, parts)
            self._usage.add(prompt, delta.usage)
        logprobs = self._prepared.logprobs_of(delta.logprobs)
        if parts.is_empty and reason is None and not is_first and not (logprobs and logprobs.content):
            return None
        message = MessageDelta(
            role="assistant" if is_first else UNSET,
            content=parts.content if parts.content or is_first else UNSET,
            reasoning=parts.reasoning or UNSET,
            tool_calls=parts.tool_calls or UNSET,
        )
        return self._chunk(
            ChatChunkChoice(
                index=delta.child,
                delta=message,
                logprobs=logprobs if logprobs is not None else UNSET,
                finish_reason=reason,
                stop_reason=UNSET if reason is None else stop_reason_of(delta.finish_reason, delta.stop_reason),
            )
        )

    def end(self) -> ChatCompletionChunk | None:
        if not self._prepared.includes_usage:
            return None
        chunk = self._chunk()
        chunk.usage = self._usage.usage
        return chunk

    def _end_of(
        self, delta: Delta, reason: FinishReason, parser: AnswerParser, parts: MessageParts
    ) -> tuple[OpenAIFinishReason, MessageParts]:
        finish_reason = finish_reason_of(reason, has_output=delta.next_index > 0)
        assert finish_reason is not None
        rest = parser.finish()
        parts = MessageParts(
            parts.content + rest.content, parts.reasoning + rest.reasoning, parts.tool_calls + rest.tool_calls
        )
        return parser.finish_reason(finish_reason), parts

    def _chunk(self, *choices: ChatChunkChoice) -> ChatCompletionChunk:
        response_id, created, model = self._head
        return ChatCompletionChunk(
            id=response_id,
            object="chat.completion.chunk",
            created=created,
            model=model,
            choices=list(choices),
            usage=None if self._prepared.includes_usage else UNSET,
            system_fingerprint=SYSTEM_FINGERPRINT,
        )


def prepare_chat(body: ChatCompletionBody) -> PreparedChat:
    """Return what a chat completion asks for.

    Raises:
        OpenAIError: a field is wrong; it is named.
        ValidationError: the same, of a sampling parameter.
    """
    body.check_stream()
    num_top = _num_top_logprobs(body)
    options = body.request_options()
    template_kwargs = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        template_kwargs["add_generation_prompt"] = body.add_generation_prompt
    if template_kwargs:
        options["chat_template_kwargs"] = template_kwargs
    return PreparedChat(
        prompts=[template_messages(body.messages)],
        params=body.sampling_params(max_tokens=body.max_completion_tokens, logprobs=num_top),
        options=options,
        stream=bool(body.stream),
        num_top_logprobs=num_top,
        includes_usage=body.includes_usage,
    )


def _num_top_logprobs(body: ChatCompletionBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_field("top_logprobs", f"top_logprobs={body.top_logprobs} needs logprobs=true")
    if not body.logprobs:
        return None
    num_top = body.top_logprobs or 0
    if not 0 <= num_top <= 20:
        raise bad_field("top_logprobs", f"top_logprobs must be in [0, 20], got {num_top}")
    return num_top
