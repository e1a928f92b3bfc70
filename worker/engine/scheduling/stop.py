"""When a generation ends. Stop strings are text, hence the worker process's business."""

from __future__ import annotations

from ....shared.messages import FinishReason
from .repetition import ends_in_repetition
from .request import Request

REPETITION_DETECTED = "repetition_detected"


def check_stop(request: Request) -> tuple[FinishReason, int | str | None] | None:
    """Return why the last output token of ``request`` ends it, and its stop reason, or None.

    An end-of-sequence token stops without a stop reason; a token of ``stop_token_ids`` is its own stop reason.
    Neither counts before ``min_tokens``, nor does a repetition; the limits on length always do, and so does the end of
    a grammar.
    """
    num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
    if num_output_tokens == 0:
        return None
    params = request.params
    has_min_tokens = num_output_tokens >= params.min_tokens
    if has_min_tokens:
        token_id = request.token_ids[-1]
        if token_id in request.eos_token_ids:
            return FinishReason.STOP, None
        if token_id in request.stop_token_ids:
            return FinishReason.STOP, token_id
    if request.constraint is not None and request.constraint.is_terminated:
        return FinishReason.STOP, None
    if num_output_tokens >= request.max_output_tokens:
        return FinishReason.LENGTH, None
    sought = params.repetition_detection if has_min_tokens else None
    if sought is not None and ends_in_repetition(request.token_ids, request.num_prompt_tokens, sought):
        return FinishReason.REPETITION, REPETITION_DETECTED
    return None
