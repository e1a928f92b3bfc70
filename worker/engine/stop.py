"""When a generation ends. Stop strings are text, hence the worker process's business."""

from __future__ import annotations

from ...shared.messages import FinishReason
from .request import Request


def check_stop(request: Request) -> tuple[FinishReason, int | None] | None:
    """Return why the last output token of ``request`` ends it, or None.

    An end-of-sequence token stops without a stop reason; a token of ``stop_token_ids`` is its own stop reason.
    Neither counts before ``min_tokens``; the limits on length always do.
    """
    num_output_tokens = request.num_output_tokens
    if num_output_tokens == 0:
        return None
    if num_output_tokens >= request.params.min_tokens:
        token_id = request.token_ids[-1]
        if token_id in request.eos_token_ids:
            return FinishReason.STOP, None
        if token_id in request.stop_token_ids:
            return FinishReason.STOP, token_id
    if num_output_tokens >= request.max_output_tokens:
        return FinishReason.LENGTH, None
    return None
