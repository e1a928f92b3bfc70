"""Final outputs, in vLLM's shapes, put together from deltas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ..shared.messages import Delta, FinishReason, TokenLogprobs, Usage
from ..shared.stats import RequestStats


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One answer to a request.

    ``logprobs`` has one entry per token, ``cumulative_logprob`` is the sum; None if the request did not ask.
    ``stats`` say where its time went; None if it never came to an engine.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    stats: RequestStats | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """A finished request, with ``n`` answers; ``usage`` counts its prompt once and the output tokens of all.

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


def final_output(request_id: str, model: str, prompt: object, wholes: Sequence[Delta]) -> RequestOutput:
    """Return the output for ``wholes``, all deltas of each answer of a finished request merged."""
    return RequestOutput(
        request_id=request_id,
        model=model,
        prompt=prompt,
        outputs=[_completion(index, whole) for index, whole in enumerate(wholes)],
        usage=_usage([whole.usage for whole in wholes if whole.usage is not None]),
        prompt_logprobs=[None, *wholes[0].prompt_logprobs] if wholes[0].prompt_logprobs else None,
        first_prompt_token=wholes[0].first_prompt_token,
    )


def _completion(index: int, whole: Delta) -> CompletionOutput:
    assert whole.finish_reason is not None
    return CompletionOutput(
        index=index,
        text=whole.text,
        token_ids=whole.token_ids,
        finish_reason=whole.finish_reason,
        stop_reason=whole.stop_reason,
        cumulative_logprob=math.fsum(token.logprob for token in whole.logprobs) if whole.logprobs else None,
        logprobs=whole.logprobs or None,
        stats=whole.stats,
    )


def _usage(each: Sequence[Usage]) -> Usage | None:
    """The answers share one prompt, which is counted once, and cached as far as it was for all."""
    if not each:
        return None
    return Usage(
        num_prompt_tokens=max(usage.num_prompt_tokens for usage in each),
        num_output_tokens=sum(usage.num_output_tokens for usage in each),
        num_cached_tokens=min(usage.num_cached_tokens for usage in each),
    )
