"""Outputs for a request's caller after a step."""

from __future__ import annotations

from ....shared.messages.from_core import EngineCoreOutput
from ....shared.messages.outcome import FinishReason, TokenLogprobs
from ....shared.params.pooling import Pooled
from .request import Request


def make_output(request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> EngineCoreOutput:
    """Return the output for new tokens, which may be none; the first one carries counts, events and prompt logprobs."""
    output = EngineCoreOutput(request.request_id, token_ids)
    if token_ids:
        output.num_cached_tokens = request.num_cached_tokens
        if request.images:
            output.num_prompt_tokens = request.num_prompt_tokens
        if request.events:
            output.events = request.pop_events()
        if request.prompt_logprobs is not None:
            output.new_prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        if logprobs:
            output.new_logprobs = logprobs[: len(token_ids)]
    return output


def make_pooled_output(request: Request, pooled: Pooled) -> EngineCoreOutput:
    """Return the only output of a pooling request."""
    return EngineCoreOutput(
        request.request_id,
        finish_reason=FinishReason.STOP,
        num_cached_tokens=request.num_cached_tokens,
        events=request.pop_events(),
        pooled=pooled,
    )
