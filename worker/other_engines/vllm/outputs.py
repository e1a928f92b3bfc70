"""Convert vLLM's outputs to ours. Arrays are numpy's or torch's, so only their common methods are used."""

from __future__ import annotations

from typing import Any

from ....shared.messages.core import EngineCoreEvent, EngineCoreEventType
from ....shared.messages.outcome import FinishReason, TokenLogprobs
from ....shared.stats import StepStats


def finish_reason_of(reason: Any) -> FinishReason | None:
    """Convert a finish reason. vLLM's five reasons have the same names as ours."""
    return None if reason is None else FinishReason(str(reason))


def logprobs_of(lists: Any, num_top: int) -> list[TokenLogprobs]:
    """Return for each position the log probabilities of its token and of the most probable ones.

    Args:
        lists: ``LogprobsLists`` or ``LogprobsTensors``: ids and log probabilities ``[N, 1 + K]``, the token in column
            0; ranks ``[N]``. ``K`` is the largest number that any request of the batch has requested.
        num_top: number that this request has requested.
    """
    if lists is None:
        return []
    ids, logprobs, ranks = (array.tolist() for array in lists[:3])
    return [
        TokenLogprobs(row[0], values[0], rank, list(zip(row[1 : 1 + num_top], values[1 : 1 + num_top], strict=True)))
        for row, values, rank in zip(ids, logprobs, ranks, strict=True)
    ]


def events_of(events: Any) -> list[EngineCoreEvent]:
    """Convert events. Both use the monotonic clock of the host."""
    return [EngineCoreEvent(EngineCoreEventType(int(event.type)), event.timestamp) for event in events or ()]


def step_stats_of(details: Any, step_time_s: float) -> StepStats | None:
    """Return the statistics of a step; None without ``details``. vLLM times the step as a whole.

    Args:
        details: ``SchedulerIterationDetails``.
        step_time_s: duration of the step, measured around the call.
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
