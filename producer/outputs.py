"""Final outputs, in vLLM's shapes, put together from deltas."""

from __future__ import annotations

import math

import msgspec

from ..shared.messages import Delta, FinishReason, TokenLogprobs, Usage


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One answer to a request.

    ``logprobs`` has one entry per token, ``cumulative_logprob`` is the sum; None if the request did not ask.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """A finished request. ``prompt`` is as the caller gave it, or None where only the request_id is known."""

    request_id: str
    model: str
    prompt: object
    outputs: list[CompletionOutput]
    usage: Usage | None
    finished: bool = True

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text


def final_output(request_id: str, model: str, prompt: object, whole: Delta) -> RequestOutput:
    """Return the output for ``whole``, all deltas of a finished request merged."""
    assert whole.finish_reason is not None
    completion = CompletionOutput(
        index=0,
        text=whole.text,
        token_ids=whole.token_ids,
        finish_reason=whole.finish_reason,
        stop_reason=whole.stop_reason,
        cumulative_logprob=math.fsum(token.logprob for token in whole.logprobs) if whole.logprobs else None,
        logprobs=whole.logprobs or None,
    )
    return RequestOutput(request_id=request_id, model=model, prompt=prompt, outputs=[completion], usage=whole.usage)
