"""Final outputs, in vLLM's shapes, put together from deltas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ...shared.messages.deltas import Delta, SegmentEnd
from ...shared.messages.outcome import FinishReason, TokenLogprobs, Usage
from ...shared.stats.engine import RequestStats
from .pooling import PoolingOutput


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One answer to a request, or what is new of it.

    ``finish_reason`` is None while it goes on.
    ``logprobs`` has one entry per token, ``cumulative_logprob`` is the sum from the first token on; None if the request
    did not ask.
    ``stats`` say where its time went; None if it never came to an engine.
    ``segment_ends`` are those of streamed input, see ``Delta``.
    ``pooled`` is what became of a prompt that is pooled, in place of text and tokens.
    ``begins_in_reasoning`` says whether the text begins within the model's thinking, see ``Delta``.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    stats: RequestStats | None = None
    segment_ends: list[SegmentEnd] = []
    pooled: PoolingOutput | None = None
    weights_version: str = ""
    begins_in_reasoning: bool | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct, kw_only=True):
    """A finished request, with ``n`` answers; ``usage`` counts its prompt once and the output tokens of all.

    ``Client.stream_outputs`` gives out some that are not ``finished``: their ``outputs`` hold the answers of which
    there is something to tell, and there is no ``usage`` yet.
    ``prompt`` is as the caller gave it, or None where only the request_id is known. ``prompt_logprobs`` has one entry
    per token of the prompt, None for the first; None if the request did not ask. ``first_prompt_token`` is then its id
    and its bytes.
    """

    request_id: str
    model: str
    prompt: object
    outputs: list[CompletionOutput]
    usage: Usage | None
    finished: bool = True
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    first_prompt_token: tuple[int, bytes] | None = None

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text

    @property
    def pooled(self) -> PoolingOutput | None:
        """What became of a prompt that is pooled; None of one that is answered."""
        return self.outputs[0].pooled


def final_output(request_id: str, model: str, prompt: object, wholes: Sequence[Delta]) -> RequestOutput:
    """Return the output for ``wholes``, all deltas of each answer of a finished request merged."""
    return RequestOutput(
        request_id=request_id,
        model=model,
        prompt=prompt,
        outputs=[completion(index, whole) for index, whole in enumerate(wholes)],
        usage=usage_of([whole.usage for whole in wholes if whole.usage is not None]),
        prompt_logprobs=prompt_logprobs_of(wholes[0]),
        first_prompt_token=wholes[0].first_prompt_token,
    )


def completion(index: int, told: Delta) -> CompletionOutput:
    """Return what ``told`` says of answer ``index``."""
    return CompletionOutput(
        index=index,
        text=told.text,
        token_ids=told.token_ids,
        finish_reason=told.finish_reason,
        stop_reason=told.stop_reason,
        cumulative_logprob=math.fsum(token.logprob for token in told.logprobs) if told.logprobs else None,
        logprobs=told.logprobs or None,
        stats=told.stats,
        segment_ends=told.segment_ends,
        pooled=None if told.pooled is None else PoolingOutput(pooled=told.pooled),
        weights_version=told.weights_version,
        begins_in_reasoning=told.begins_in_reasoning,
    )


def prompt_logprobs_of(told: Delta) -> list[TokenLogprobs | None] | None:
    """One entry per token of the prompt, if ``told`` has any."""
    return [None, *told.prompt_logprobs] if told.prompt_logprobs else None


def usage_of(each: Sequence[Usage]) -> Usage | None:
    """The answers share one prompt, which is counted once, and cached as far as it was for all."""
    if not each:
        return None
    return Usage(
        num_prompt_tokens=max(usage.num_prompt_tokens for usage in each),
        num_output_tokens=sum(usage.num_output_tokens for usage in each),
        num_cached_tokens=min(usage.num_cached_tokens for usage in each),
        num_accepted_prediction_tokens=sum(usage.num_accepted_prediction_tokens for usage in each),
        num_rejected_prediction_tokens=sum(usage.num_rejected_prediction_tokens for usage in each),
    )
