"""Detects the end of a generation. The worker process checks stop strings, because they are text."""

from __future__ import annotations

from typing import NamedTuple

from ....shared.messages.outcome import FinishReason, RequestError
from ....shared.params.sampling import RepetitionDetectionParams
from .request import Request


def ends_in_repetition(token_ids: list[int], num_skipped: int, params: RepetitionDetectionParams) -> bool:
    """Return whether ``token_ids`` ends with ``params.min_count`` copies of a pattern of a size within the bounds.

    The size of a pattern is the distance between the last token and an earlier equal token, so only such sizes are
    compared. The search for equal tokens runs in C, and few of the last tokens are equal in ordinary text.

    Args:
        num_skipped: length of the prompt, which is not searched.
    """
    longest = min(params.max_pattern_size, (len(token_ids) - num_skipped) // max(params.min_count, 1))
    size = max(params.min_pattern_size, 1)
    if size > longest:
        return False
    before = token_ids[-1 - longest : -1]
    before.reverse()
    try:
        while True:
            size = before.index(token_ids[-1], size - 1) + 1
            tail = token_ids[-size * params.min_count :]
            if tail[size:] == tail[:-size]:
                return True
            size += 1
    except ValueError:
        return False


REPETITION_DETECTED = "repetition_detected"


class Stop(NamedTuple):
    """Reason for the end of a request, as in its output."""

    reason: FinishReason
    stop_reason: int | str | None = None
    error: RequestError | None = None


def append_tokens_until_stop(request: Request, token_ids: list[int]) -> Stop | None:
    """Append a step's tokens to ``request`` one by one, up to a token that ends it; return the end, or None.

    Tokens that are not appended are deleted from ``token_ids``: tokens after an end, and a token with which the grammar
    failed, for the reason in ``failure``. The grammar has accepted all of them, and only the last can have ended or
    failed it.
    """
    constraint, num_following = request.constraint, len(token_ids)
    for token_id in token_ids:
        num_following -= 1
        if constraint is not None and num_following == 0 and constraint.failure is not None:
            del token_ids[-1:]
            return Stop(FinishReason.ERROR, error=constraint.failure)
        request.token_ids.append(token_id)
        stop = check_stop(request, num_following)
        if stop is not None:
            if num_following:
                del token_ids[-num_following:]
            return stop
    return None


def check_stop(request: Request, num_following: int = 0) -> Stop | None:
    """Return why the last output token of ``request`` ends it, and its stop reason, or None.

    An end-of-sequence token stops without a stop reason; a token of ``stop_token_ids`` is its own stop reason.
    Neither counts before ``min_tokens``, nor does a repetition. The limits on length and the end of a grammar always
    count.

    Args:
        num_following: tokens that the grammar has accepted after that one.
    """
    num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
    if num_output_tokens == 0:
        return None
    params = request.params
    has_min_tokens = num_output_tokens >= params.min_tokens
    if has_min_tokens:
        token_id = request.token_ids[-1]
        if token_id in request.eos_token_ids:
            return Stop(FinishReason.STOP)
        if token_id in request.stop_token_ids:
            return Stop(FinishReason.STOP, token_id)
    if num_following == 0 and request.constraint is not None and request.constraint.is_terminated:
        return Stop(FinishReason.STOP)
    if num_output_tokens >= request.max_output_tokens:
        return Stop(FinishReason.LENGTH)
    sought = params.repetition_detection if has_min_tokens else None
    if sought is not None and ends_in_repetition(request.token_ids, request.num_prompt_tokens, sought):
        return Stop(FinishReason.REPETITION, REPETITION_DETECTED)
    return None
