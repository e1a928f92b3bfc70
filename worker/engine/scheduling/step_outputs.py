"""What a request's caller is to know of a step."""

from __future__ import annotations

from ....shared.messages.from_core import EngineCoreOutput
from ....shared.messages.outcome import FinishReason, TokenLogprobs
from ....shared.params.pooling import Pooled
from .request import Request


def output_of(request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> EngineCoreOutput:
    """New tokens, of which there may be none, and what is told with the first."""
    output = EngineCoreOutput(request.request_id, token_ids)
    if token_ids:
        output.num_cached_tokens = request.num_cached_tokens
        if request.images:
            output.num_prompt_tokens = request.num_prompt_tokens
        if request.events:
            output.events = request.take_events()
        if request.prompt_logprobs is not None:
            output.new_prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        if logprobs:
            output.new_logprobs = logprobs[: len(token_ids)]
    return output


def end_of_pooled(request: Request, pooled: Pooled) -> EngineCoreOutput:
    """The one output of a request that pools."""
    return EngineCoreOutput(
        request.request_id,
        finish_reason=FinishReason.STOP,
        num_cached_tokens=request.num_cached_tokens,
        events=request.take_events(),
        pooled=pooled,
    )
