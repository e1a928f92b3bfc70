"""Times the parts of one step."""

from __future__ import annotations

import time

from ....shared.stats import StepStats
from ..scheduling.scheduler_output import SchedulerOutput


class StepWatch:
    """A timer that starts when it is created. Its methods mark the ends of the parts of a step, in order."""

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
        """Stop the clock until ``resume``."""
        self._paused_at = time.perf_counter(), time.thread_time()

    def resume(self) -> None:
        """Continue to time the step."""
        paused_at, cpu_paused_at_s = self._paused_at
        gap = time.perf_counter() - paused_at
        self._times = [time_s + gap for time_s in self._times]
        self._cpu_began_s += time.thread_time() - cpu_paused_at_s

    def failed(self) -> None:
        """End the timing of a step that has raised or had nothing to compute. Overridden by profilers."""

    def updated(self) -> StepStats:
        """Return the statistics of the step."""
        started, scheduled, executed = self._times
        prefills = [num_tokens for num_tokens in self._batch.num_known_tokens() if num_tokens > 1]
        num_context_tokens, num_prefill_pairs = self._count_context()
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

    def _count_context(self) -> tuple[int, int]:
        """Count the tokens that decoding requests attended to, and the token pairs of prefilling ones.

        The counts of computed tokens already include this step.
        """
        num_context_tokens = num_pairs = 0
        work = zip(self._batch.requests, self._batch.num_known_tokens(), strict=True)
        for request, num_new_tokens in work:
            if num_new_tokens == 1:
                num_context_tokens += request.num_computed_tokens
            else:
                num_pairs += num_new_tokens * max(0, request.num_computed_tokens - num_new_tokens // 2)
        return num_context_tokens, num_pairs
