"""Times the parts of one step."""

from __future__ import annotations

import time

from ...shared.stats import StepStats
from .scheduling.scheduler_output import SchedulerOutput


class StepWatch:
    """Runs from its making; to be told of the end of each part, in order."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]
        self._batch = SchedulerOutput()

    def scheduled(self, batch: SchedulerOutput) -> None:
        self._times.append(time.perf_counter())
        self._batch = batch

    def executed(self) -> None:
        self._times.append(time.perf_counter())

    def failed(self) -> None:
        """The step has raised: there is nothing more to be told of."""

    def updated(self) -> StepStats:
        """Return what the step did."""
        started, scheduled, executed = self._times
        prefills = [num_new_tokens for num_new_tokens in self._batch.num_new_tokens if num_new_tokens > 1]
        return StepStats(
            num_reqs=len(self._batch.requests),
            num_prefill_reqs=len(prefills),
            num_prefill_tokens=sum(prefills),
            num_decode_tokens=len(self._batch.requests) - len(prefills),
            schedule_time_s=scheduled - started,
            execute_time_s=executed - scheduled,
            update_time_s=time.perf_counter() - executed,
        )
