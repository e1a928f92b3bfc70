"""Final outputs, in vLLM's forms, combined from deltas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ...shared.messages.deltas import Delta, SegmentEnd
from ...shared.messages.outcome import FinishReason, TokenLogprobs, Usage
from ...shared.stats import RequestStats
from .pooling import PoolingOutput


class CompletionOutput(msgspec.Struct, kw_only=True):
    """An answer to a request, or its new part.

    ``finish_reason`` is None while the answer is generated.
    ``logprobs`` has one entry per token, ``cumulative_logprob`` is the sum from the first token on; None unless
    requested.
    ``stats`` has the times of the request; None if it never reached an engine.
    ``segment_ends`` are those of streamed input, see ``Delta``.
    ``pooled`` is the result of a pooling request, instead of text and tokens.
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
    """A finished request, with ``n`` answers; ``usage`` counts its prompt once and the output tokens of all answers.

    ``Client.stream_outputs`` also yields outputs that are not ``finished``: their ``outputs`` hold the answers that
    have changed, and ``usage`` is None.
    ``prompt`` is the caller's prompt, or None if only the request_id is known. ``prompt_logprobs`` has one entry per
    token of the prompt, None for the first; None unless requested. ``first_prompt_token`` is then its id and its bytes.
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
        """The result of a pooling request; None for a request that generates."""
        return self.outputs[0].pooled


def final_output(request_id: str, model: str, prompt: object, wholes: Sequence[Delta]) -> RequestOutput:
    """Return the output of a finished request. ``wholes`` has one merged delta per answer."""
    return RequestOutput(
        request_id=request_id,
        model=model,
        prompt=prompt,
        outputs=[completion(index, whole) for index, whole in enumerate(wholes)],
        usage=usage_of([whole.usage for whole in wholes if whole.usage is not None]),
        prompt_logprobs=prompt_logprobs_of(wholes[0]),
        first_prompt_token=wholes[0].first_prompt_token,
    )


def completion(index: int, delta: Delta) -> CompletionOutput:
    """Return ``delta`` as the output of answer ``index``."""
    return CompletionOutput(
        index=index,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        cumulative_logprob=math.fsum(token.logprob for token in delta.logprobs) if delta.logprobs else None,
        logprobs=delta.logprobs or None,
        stats=delta.stats,
        segment_ends=delta.segment_ends,
        pooled=None if delta.pooled is None else PoolingOutput(pooled=delta.pooled),
        weights_version=delta.weights_version,
        begins_in_reasoning=delta.begins_in_reasoning,
    )


def prompt_logprobs_of(delta: Delta) -> list[TokenLogprobs | None] | None:
    """Return one entry per token of the prompt, if ``delta`` has any."""
    return [None, *delta.prompt_logprobs] if delta.prompt_logprobs else None


def usage_of(each: Sequence[Usage]) -> Usage | None:
    """Sum the usage of answers. Their shared prompt is counted once; its cached tokens are those cached for all
    answers.
    """
    if not each:
        return None
    return Usage(
        num_prompt_tokens=max(usage.num_prompt_tokens for usage in each),
        num_output_tokens=sum(usage.num_output_tokens for usage in each),
        num_cached_tokens=min(usage.num_cached_tokens for usage in each),
        num_accepted_prediction_tokens=sum(usage.num_accepted_prediction_tokens for usage in each),
        num_rejected_prediction_tokens=sum(usage.num_rejected_prediction_tokens for usage in each),
    )
