"""Turn a claim into a request that the engine core can run, or raise the error that its caller gets."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ....shared.broker import Claim
from ....shared.errors import PenstockError, UnsupportedParameterError, ValidationError
from ....shared.messages.core import Ready
from ....shared.messages.deltas import Delta
from ....shared.messages.requests import EngineCoreRequest, InputChunk
from ....shared.params.checks import check_known
from ....shared.params.sampling import SamplingParams
from ....shared.process.log import log_ids
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

# A bad word costs as much time as this many characters of text.
BAD_WORD_CHARS = 64


class UndecodableEntryError(ValidationError):
    """The bytes of a stream entry are not a request that this version can decode."""


_decoder = msgspec.msgpack.Decoder(EngineCoreRequest)
_chunk_decoder = msgspec.msgpack.Decoder(InputChunk)
# Exceptions of decoding; RecursionError is raised for lists that are nested too deep.
_UNREADABLE = (msgspec.MsgspecError, PenstockError, UnicodeDecodeError, RecursionError)


def ids_of(claim: Claim) -> dict[str, str]:
    """Return the ids of a claimed request for the log: only the request_id if its bytes cannot be decoded."""
    try:
        request = _decoder.decode(claim.payload)
    except _UNREADABLE:
        return log_ids(claim.request_id)
    return log_ids(claim.request_id, request.external_req_id, request.trace_headers)


class Intake:
    """Decodes, checks and tokenizes claimed requests of the model that ``ready`` describes."""

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
        """Return the claimed request with the claim's epoch, and its prompt as token ids unless it is embeddings.

        Raises:
            UndecodableEntryError: the bytes are not a request.
            ValidationError: the request has parameters that this engine does not support.
            PromptTooLongError: prompt and one output token exceed ``max_model_len``.
        """
        try:
            request = _decoder.decode(claim.payload)
        except _UNREADABLE as error:
            raise UndecodableEntryError(
                f"the stream entry is not a request that this worker can decode: {error}"
            ) from error
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
            params = msgspec.structs.replace(params, truncate_prompt_tokens=None)  # already applied
        is_pooled = request.pooling_params is not None
        check_prompt_length(request.num_prompt_tokens, self._max_model_len, is_pooled=is_pooled)
        return msgspec.structs.replace(
            request,
            prediction=None,
            tokenization=None,
            draft_token_ids=await self._tokens.prediction_token_ids(request),
            sampling_params=await self._complete(self._with_grammar_start(request, params)),
            request_id=claim.request_id,
            epoch=claim.epoch,
            attempt=claim.attempt,
        )

    async def segment(self, request: EngineCoreRequest, chunks: list[bytes], logged: list[Delta]) -> Segment:
        """Return the segment to generate now for a resumable request, as ``prepare`` returned it.

        Args:
            chunks: its encoded input after the first chunk.
            logged: its whole log.

        Raises:
            UndecodableEntryError: the bytes of a chunk cannot be decoded.
            ValidationError: a chunk has no tokens, or parameters that are not supported.
            PromptTooLongError: chunks and output so far leave no space for an output token.
        """
        try:
            decoded = [_chunk_decoder.decode(chunk) for chunk in chunks]
        except _UNREADABLE as error:
            raise UndecodableEntryError(f"a chunk of input is not one that this worker can decode: {error}") from error
        token_ids = [await self._tokens.chunk_token_ids(number, chunk) for number, chunk in enumerate(decoded, start=1)]
        chunk_params = [chunk.sampling_params for chunk in decoded]
        segment = current_segment(request, token_ids, logged, self._max_model_len, chunk_params)
        own_params = chunk_params[segment.number - 1] if segment.number else None
        if own_params is None:
            return segment
        self._checked(own_params, is_resumable=True)
        assert segment.request.sampling_params is not None  # those of the chunk, with a seed
        # A later segment begins in the middle of a conversation, where no chat template applies.
        without_chat = msgspec.structs.replace(segment.request, messages=None)
        params = self._with_grammar_start(without_chat, segment.request.sampling_params)
        completed = msgspec.structs.replace(segment.request, sampling_params=await self._complete(params))
        return replace(segment, request=completed)

    def _checked(self, params: SamplingParams, *, is_resumable: bool) -> SamplingParams:
        """Return the ``params`` of a request or chunk. Raises ``ValidationError`` if they are not supported."""
        params.check_from_caller()
        params.check_supported()
        check_known(params.extra_args, self._logits_processors)
        for name in ("prompt_logprobs", "truncate_prompt_tokens") if is_resumable else ():
            if getattr(params, name) is not None:
                raise UnsupportedParameterError(
                    f"{name}: a resumable request's prompt comes in parts; leave it at None"
                )
        return params

    def _with_grammar_start(self, request: EngineCoreRequest, params: SamplingParams) -> SamplingParams:
        """Return ``params`` in which a grammar has ``enable_in_reasoning``: whether it applies before thinking ends.

        The caller's own value is kept. Other engines decide it themselves.
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
