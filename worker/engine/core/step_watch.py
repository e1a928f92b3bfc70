"""Times the parts of one step."""

from __future__ import annotations

import time

from ....shared.stats.engine import StepStats
from ..scheduling.scheduler_output import SchedulerOutput


class StepWatch:
    """Runs from its making; to be told of the end of each part, in order."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]
        self._cpu_began_s = time.thread_time()
        self._batch = SchedulerOutput()
        self._paused_at = (0.0, 0.0)

    def scheduled(self, batch: SchedulerOutput) -> None:
        self._times.append(time.perf_counter())
        self._batch = batch

    def executed(self) -> None:
        self._times.append(time.perf_counter())

    def pause(self) -> None:
        """What follows is no part of the step, until ``resume``."""
        self._paused_at = time.perf_counter(), time.thread_time()

    def resume(self) -> None:
        """The step goes on."""
        paused_at, cpu_paused_at_s = self._paused_at
        gap = time.perf_counter() - paused_at
        self._times = [moment + gap for moment in self._times]
        self._cpu_began_s += time.thread_time() - cpu_paused_at_s

    def failed(self) -> None:
        """The step has raised, or had nothing to compute: there is nothing more to be told of."""

    def updated(self) -> StepStats:
        """Return what the step did."""
        started, scheduled, executed = self._times
        prefills = [num_tokens for num_tokens in self._batch.num_known_tokens() if num_tokens > 1]
        num_context_tokens, num_prefill_pairs = self._looked_back_at()
        return StepStats(
            num_reqs=len(self._batch.requests),
            num_prefill_reqs=len(prefills),
            num_prefill_tokens=sum(prefills),
            num_decode_tokens=sum(self._batch.num_new_tokens) - sum(prefills),
            schedule_time_s=scheduled - started,
            execute_time_s=executed - scheduled,
            update_time_s=time.perf_counter() - executed,
            num_context_tokens=num_context_tokens,
            num_prefill_pairs=num_prefill_pairs,
            cpu_time_s=time.thread_time() - self._cpu_began_s,
        )

    def _looked_back_at(self) -> tuple[int, int]:
        """By those that decoded, and by those that prefilled: the step has computed their tokens by now."""
        num_context_tokens = num_pairs = 0
        known = zip(self._batch.requests, self._batch.num_known_tokens(), strict=True)
        for request, num_new_tokens in known:
            if num_new_tokens == 1:
                num_context_tokens += request.num_computed_tokens
            else:
                num_pairs += num_new_tokens * max(0, request.num_computed_tokens - num_new_tokens // 2)
        return num_context_tokens, num_pairs
