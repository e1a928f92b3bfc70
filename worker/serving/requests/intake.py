"""Turn a claim into a request that the engine core can run, with its tokens, or raise the error that its caller gets.

The tokens are those of its prompt, of its chunks, and of its predicted output. A pooling request may name a prompt,
which is put before its text, and may consist of a pair of texts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec

from ....shared.broker import Claim
from ....shared.errors import PenstockError, UnsupportedParameterError, ValidationError
from ....shared.messages.core import Ready
from ....shared.messages.deltas import Delta
from ....shared.messages.requests import EngineCoreRequest, InputChunk
from ....shared.params.checks import check_known
from ....shared.params.pooling import PoolingSetup
from ....shared.params.prompts import LEFT, Cut, num_kept
from ....shared.params.sampling import SamplingParams
from ....shared.process.log import log_ids
from ....shared.values.shown import shown
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


class PooledText:
    """Completes the texts of requests to a pooling model, from the prompts in its folder."""

    def __init__(self, codec: TextCodec, setup: PoolingSetup | None, thread: TextThread) -> None:
        self._codec = codec
        self._thread = thread
        self._setup = setup or PoolingSetup()

    async def complete(self, request: EngineCoreRequest, cut: Cut | None = None) -> None:
        """Put the named prompt, or the model's default one, before the text. Tokenize a pair of texts.

        Args:
            cut: truncation of a pair.

        Raises:
            ValidationError: the model has no such prompt, or a prompt is named for an input that is not text.
        """
        params = request.pooling_params
        name = None if params is None else params.prompt_name
        if request.prompt is None:
            if name is not None:
                raise ValidationError(f"prompt_name={shown(name)} requires a text prompt; leave it out")
            return
        beginning = self._beginning(name)
        if request.text_pair is None:
            request.prompt = beginning + request.prompt
            return
        text, other = beginning + request.prompt, request.text_pair
        request.prompt_token_ids, request.second_text_at = await self._thread.run(
            lambda: self._codec.encode_pair(text, other, cut), len(text) + len(other)
        )
        request.prompt = request.text_pair = None

    def _beginning(self, name: str | None) -> str:
        prompts = self._setup.prompts
        if name is None:
            return prompts.get(self._setup.default_prompt_name or "", "")
        if name not in prompts:
            allowed = f"one of {', '.join(sorted(prompts))}" if prompts else "left out: the model has no prompts"
            raise ValidationError(f"prompt_name must be {allowed}, got {shown(name)}")
        return prompts[name]


class PromptTokens:
    """Tokenizes the prompts of one model, long ones in ``thread``. ``setup`` is that of a pooling model."""

    def __init__(self, codec: TextCodec, max_model_len: int, setup: PoolingSetup | None, thread: TextThread) -> None:
        self._codec = codec
        self._max_model_len = max_model_len
        self._thread = thread
        self._pooled_text = PooledText(codec, setup, thread)

    async def complete(self, request: EngineCoreRequest, num_bytes: int) -> None:
        """Set the prompt tokens of ``request``, which has ``num_bytes``, unless its prompt is embeddings.

        Raises:
            ValidationError: the prompt is missing or has no tokens, or it cannot be truncated.
            PromptTooLongError: the prompt cannot fit, however it is tokenized.
        """
        cut = self._truncation(request)
        if request.pooling_params is not None:
            await self._pooled_text.complete(request, cut)
        if request.prompt_embeds is None:
            request.prompt_token_ids = await self._tokenize(request, cut, num_bytes)

    async def chunk_token_ids(self, number: int, chunk: InputChunk) -> list[int]:
        """Tokenize a chunk, without the tokens that begin and end a text, since it continues in the middle of one.

        Raises:
            ValidationError: the chunk has no tokens.
        """
        if chunk.prompt_token_ids is not None:
            token_ids = chunk.prompt_token_ids
        elif chunk.prompt is None:
            raise ValidationError(f"chunk {number} of the input has neither prompt nor prompt_token_ids")
        else:
            token_ids = await self._encode_middle(chunk.prompt)
        if not token_ids:
            raise ValidationError(f"chunk {number} of the input has no tokens")
        return token_ids

    async def prediction_token_ids(self, request: EngineCoreRequest) -> list[int] | None:
        """Tokenize the predicted output as the middle of a text, since an output continues the prompt."""
        return request.draft_token_ids if request.prediction is None else await self._encode_middle(request.prediction)

    async def _encode_middle(self, text: str) -> list[int]:
        return await self._thread.run(lambda: self._codec.encode_chunk(text), len(text))

    async def _tokenize(self, request: EngineCoreRequest, cut: Cut | None, num_bytes: int) -> list[int]:
        add_special_tokens = None if request.tokenization is None else request.tokenization.add_special_tokens
        prompt, messages = request.prompt, request.messages
        if request.prompt_token_ids is not None:
            token_ids = request.prompt_token_ids
            # A pair was truncated when it was tokenized, because the start of its second text must not move.
            if cut is not None and request.second_text_at is None:
                token_ids = cut.apply(token_ids)
        elif messages is not None:
            kwargs = request.chat_template_kwargs
            self._check_tools(request)
            text = await self._thread.run(lambda: self._codec.render_chat(messages, kwargs), num_bytes)
            token_ids = await self._encode(request, text, cut, add_special_tokens=bool(add_special_tokens))
        elif prompt is not None:
            token_ids = await self._encode(request, prompt, cut, add_special_tokens=add_special_tokens is not False)
        else:
            raise ValidationError("the request has no prompt: one of prompt, prompt_token_ids and messages must be set")
        if not token_ids:
            raise ValidationError("prompt has no tokens")
        return token_ids

    def _check_tools(self, request: EngineCoreRequest) -> None:
        """Refuse tools that the model would not see. A grammar shows it their names and arguments as it writes them.

        Raises:
            ValidationError: the chat template does not use the tools, and no grammar contains them.
        """
        params = request.sampling_params
        has_grammar = params is not None and params.structured_outputs is not None
        if (request.chat_template_kwargs or {}).get("tools") and not has_grammar and not self._codec.can_show_tools:
            raise ValidationError(
                "tools: the chat template of this model cannot show tools to it; serve a model whose template can, "
                "force a call by tool_choice 'required', or leave tools out and describe them in a message"
            )

    async def _encode(
        self, request: EngineCoreRequest, text: str, cut: Cut | None, *, add_special_tokens: bool
    ) -> list[int]:
        check = partial(
            check_prompt_length, max_model_len=self._max_model_len, is_pooled=request.pooling_params is not None
        )
        if cut is None:
            check(self._codec.min_num_tokens(text), is_lower_bound=True)
        encode = partial(self._codec.encode, text, add_special_tokens=add_special_tokens, cut=cut, check_length=check)
        return await self._thread.run(encode, len(text))

    def _truncation(self, request: EngineCoreRequest) -> Cut | None:
        """Return how the prompt is truncated; None if it is not."""
        max_tokens, params = request.truncate_prompt_tokens, request.sampling_params
        if max_tokens is None:
            return None
        if request.prompt_embeds is not None:
            raise UnsupportedParameterError("truncate_prompt_tokens needs a prompt of tokens, not of embeddings")
        if request.images:
            raise UnsupportedParameterError("truncate_prompt_tokens: a prompt with images cannot be cut; leave it out")
        if request.resumable:
            raise UnsupportedParameterError(
                "truncate_prompt_tokens: a resumable request's prompt comes in parts; leave it at None"
            )
        num_output_tokens = 0 if request.pooling_params is not None or params is None else params.max_tokens or 1
        side = None if request.tokenization is None else request.tokenization.truncation_side
        return Cut(num_kept(max_tokens, self._max_model_len, num_output_tokens), side or LEFT)
