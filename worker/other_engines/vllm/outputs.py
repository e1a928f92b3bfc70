"""vLLM's outputs as ours. Arrays are numpy's or torch's: what both have is all that is asked of them."""

from __future__ import annotations

from typing import Any

from ....shared.messages.from_core import EngineCoreEvent, EngineCoreEventType
from ....shared.messages.outcome import FinishReason, TokenLogprobs
from ....shared.stats.engine import StepStats


def finish_reason_of(reason: Any) -> FinishReason | None:
    """Its five are ours, by the same words."""
    return None if reason is None else FinishReason(str(reason))


def logprobs_of(lists: Any, num_top: int) -> list[TokenLogprobs]:
    """Of each position the token, then the most probable ones.

    Args:
        lists: ``LogprobsLists`` or ``LogprobsTensors``: ids and log probabilities ``[N, 1 + K]``, the token in column
            0; ranks ``[N]``. ``K`` is the most that any request of the batch has asked for.
        num_top: how many this one has.
    """
    if lists is None:
        return []
    ids, logprobs, ranks = (array.tolist() for array in lists[:3])
    return [
        TokenLogprobs(row[0], values[0], rank, list(zip(row[1 : 1 + num_top], values[1 : 1 + num_top], strict=True)))
        for row, values, rank in zip(ids, logprobs, ranks, strict=True)
    ]


def events_of(events: Any) -> list[EngineCoreEvent]:
    """By the same clock: the monotonic one of the host."""
    return [EngineCoreEvent(EngineCoreEventType(int(event.type)), event.timestamp) for event in events or ()]


def step_stats_of(details: Any, step_time_s: float) -> StepStats | None:
    """What vLLM says of a step; None if it says nothing. It times the step as a whole.

    Args:
        details: ``SchedulerIterationDetails``.
        step_time_s: what the step took, as seen from outside.
    """
    if details is None:
        return None
    execute_time_s = min(details.elapsed_ms / 1000, step_time_s)
    return StepStats(
        num_reqs=details.num_ctx_requests + details.num_generation_requests,
        num_prefill_reqs=details.num_ctx_requests,
        num_prefill_tokens=details.num_ctx_tokens,
        num_decode_tokens=details.num_generation_tokens,
        execute_time_s=execute_time_s,
        update_time_s=step_time_s - execute_time_s,
    )
