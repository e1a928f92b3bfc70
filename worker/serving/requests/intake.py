"""From a claim to a request the engine core can run, or to the error its caller gets."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ....shared.broker import Claim
from ....shared.errors import PenstockError, UnsupportedParameterError, ValidationError
from ....shared.log import log_ids
from ....shared.messages.deltas import Delta
from ....shared.messages.from_core import Ready
from ....shared.messages.requests import EngineCoreRequest, InputChunk
from ....shared.params.extra_args import check_known
from ....shared.params.sampling import SamplingParams
from ...request_checks import (
    check_adapter,
    check_images_served,
    check_priority,
    check_prompt_length,
    check_served,
    check_task,
)
from ...text.thread import TextThread
from ...text.tokenizer import TextCodec
from .prompt_tokens import PromptTokens
from .segments import Segment, current_segment

# A bad word costs as much time as so many characters of a text.
BAD_WORD_CHARS = 64


class UndecodableEntryError(ValidationError):
    """The bytes of a stream entry are no request that this version can read."""


_decoder = msgspec.msgpack.Decoder(EngineCoreRequest)
_chunk_decoder = msgspec.msgpack.Decoder(InputChunk)
# What decoding raises: RecursionError of lists that are nested too deep.
_UNREADABLE = (msgspec.MsgspecError, PenstockError, UnicodeDecodeError, RecursionError)


def ids_of(claim: Claim) -> dict[str, str]:
    """What the log calls a claimed request, as far as it reads."""
    try:
        request = _decoder.decode(claim.payload)
    except _UNREADABLE:
        return log_ids(claim.request_id)
    return log_ids(claim.request_id, request.external_req_id, request.trace_headers)


class Intake:
    """Decodes, checks and tokenizes claimed requests of one model, whose engine is ``ready``."""

    def __init__(self, codec: TextCodec, ready: Ready) -> None:
        self.codec = codec
        self._max_model_len = ready.max_model_len
        self._supported_tasks = ready.supported_tasks
        self.thread = TextThread("prompt")
        self._tokens = PromptTokens(codec, ready.max_model_len, ready.pooling, self.thread)
        self._max_images, self._image_refusal = ready.max_images, ready.image_refusal
        self._logits_processors = frozenset(ready.logits_processors)
        self._can_wait_for_thinking = ready.engine == "penstock"
        self._engine, self._has_adapters = ready.engine, ready.lora is not None
        self._scheduling_policy = ready.scheduling_policy

    async def prepare(self, claim: Claim) -> EngineCoreRequest:
        """Return the claimed request with its prompt as token ids, unless it is embeddings, and the claim's epoch.

        Raises:
            UndecodableEntryError: the bytes are no request.
            ValidationError: the request asks for what cannot be.
            PromptTooLongError: prompt and one output token exceed ``max_model_len``.
        """
        try:
            request = _decoder.decode(claim.payload)
        except _UNREADABLE as error:
            raise UndecodableEntryError(f"the stream entry is not a request this worker can read: {error}") from error
        check_task(request, self._supported_tasks)
        check_adapter(request, has_adapters=self._has_adapters, engine=self._engine)
        check_priority(request, self._scheduling_policy, engine=self._engine)
        params = self._checked(check_served(request), is_resumable=request.resumable)
        if request.resumable and request.prediction is not None:
            raise UnsupportedParameterError("prediction: a resumable request has many outputs; leave it out")
        check_images_served(request, self._max_images, self._image_refusal)
        if request.prompt_embeds is not None and request.resumable:
            raise UnsupportedParameterError("prompt_embeds: a resumable request's input must be text or token ids")
        await self._tokens.complete(request, len(claim.payload))
        if params.truncate_prompt_tokens is not None:
            params = msgspec.structs.replace(params, truncate_prompt_tokens=None)  # it is done
        is_pooled = request.pooling_params is not None
        check_prompt_length(request.num_prompt_tokens, self._max_model_len, is_pooled=is_pooled)
        return msgspec.structs.replace(
            request,
            prediction=None,
            tokenization=None,
            draft_token_ids=await self._tokens.of_prediction(request),
            sampling_params=await self._complete(self._with_place_of_grammar(request, params)),
            request_id=claim.request_id,
            epoch=claim.epoch,
            attempt=claim.attempt,
        )

    async def segment(self, request: EngineCoreRequest, chunks: list[bytes], logged: list[Delta]) -> Segment:
        """Return what a resumable request, as ``prepare`` gave it, is to generate now.

        Args:
            chunks: its encoded input after the first chunk.
            logged: its whole log.

        Raises:
            UndecodableEntryError: the bytes of a chunk are none.
            ValidationError: a chunk has no tokens, or parameters that cannot be.
            PromptTooLongError: all chunks and their output leave no room for an output token.
        """
        try:
            decoded = [_chunk_decoder.decode(chunk) for chunk in chunks]
        except _UNREADABLE as error:
            raise UndecodableEntryError(f"a chunk of input is none this worker can read: {error}") from error
        token_ids = [await self._tokens.of_chunk(number, chunk) for number, chunk in enumerate(decoded, start=1)]
        each = [chunk.sampling_params for chunk in decoded]
        segment = current_segment(request, token_ids, logged, self._max_model_len, each)
        own = each[segment.number - 1] if segment.number else None
        if own is None:
            return segment
        self._checked(own, is_resumable=True)
        assert segment.request.sampling_params is not None  # those of the chunk, with a seed
        # No chat begins in the middle of a conversation.
        going_on = msgspec.structs.replace(segment.request, messages=None)
        placed = self._with_place_of_grammar(going_on, segment.request.sampling_params)
        completed = msgspec.structs.replace(segment.request, sampling_params=await self._complete(placed))
        return replace(segment, request=completed)

    def _checked(self, params: SamplingParams, *, is_resumable: bool) -> SamplingParams:
        """Return ``params``, of a request or of a chunk. Raises ``ValidationError`` for what cannot be."""
        params.check_from_caller()
        params.check_supported()
        check_known(params.extra_args, self._logits_processors)
        for name in ("prompt_logprobs", "truncate_prompt_tokens") if is_resumable else ():
            if getattr(params, name) is not None:
                raise UnsupportedParameterError(
                    f"{name}: a resumable request's prompt comes in parts; leave it at None"
                )
        return params

    def _with_place_of_grammar(self, request: EngineCoreRequest, params: SamplingParams) -> SamplingParams:
        """Say of a grammar whether it waits for the end of thinking, where the caller has not. Other engines decide
        that themselves.
        """
        grammar = params.structured_outputs
        if grammar is None or grammar.enable_in_reasoning is not None or not self._can_wait_for_thinking:
            return params
        waits = (
            params.is_thinking_limited
            or (request.messages is not None and self.codec.can_think_first)
            or self.codec.has_begun_thinking(request.prompt_token_ids or [])
        )
        placed = msgspec.structs.replace(grammar, enable_in_reasoning=not waits)
        return msgspec.structs.replace(params, structured_outputs=placed)

    async def _complete(self, params: SamplingParams) -> SamplingParams:
        num_chars = sum(BAD_WORD_CHARS + len(word) for word in params.bad_words or ())
        return await self.thread.run(lambda: self.codec.complete(params), num_chars)
