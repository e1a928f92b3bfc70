"""The engine core whose model is computed in stages: as many batches in flight as stages (decision 0096)."""

from __future__ import annotations

from collections import deque
from typing import Any

from ....shared.messages.from_core import EngineCoreOutput
from ..scheduling.batches.staged_batches import StagedBatches
from ..scheduling.scheduler_output import SchedulerOutput
from .engine_core import EngineCore
from .step_watch import StepWatch


class PipelinedCore(EngineCore):
    """Makes the same tokens of the same requests as ``EngineCore``.

    Args:
        stages: the batches in flight, which the scheduler asks, too.
        parts, named: the arguments of ``EngineCore``.
    """

    def __init__(self, stages: StagedBatches, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        self._stages = stages
        # Of the batches in flight.
        self._watches: deque[StepWatch] = deque()
        self.step_fn = self.step_with_batch_queue

    @property
    def has_work(self) -> bool:
        return len(self._stages) > 0 or super().has_work

    def step_with_batch_queue(self) -> list[EngineCoreOutput]:
        """Launch a batch of requests that are in none, if there is room for it; else wait for the oldest one.

        It returns when a batch is launched, so that requests that have come meanwhile are in the next. If a batch
        raises, none is launched until all have landed; then ``step`` does the isolation.

        Raises:
            EngineDeadError: as ``step``.
        """
        stages, is_isolating = self._stages, self._isolation.is_active
        if is_isolating and not stages:
            return self.step()
        ended = self._take_ready()
        may_launch = self.scheduler.has_unfinished_requests and not (is_isolating or stages.is_full)
        if may_launch and self._launch_next(ended):
            return ended
        if stages:
            ended += self._land_oldest()
        return ended

    def settle(self) -> list[EngineCoreOutput]:
        """As ``EngineCore``: wait for all batches that are in flight."""
        outputs: list[EngineCoreOutput] = []
        while self._stages:
            outputs += self._land_oldest()
        return outputs

    def _launch_next(self, ended: list[EngineCoreOutput]) -> bool:
        """Schedule and launch a batch; False if there is nothing to compute yet. Requests that it ends go to
        ``ended``."""
        watch = self.step_watch()
        batch = self.scheduler.schedule()
        if not batch.requests:
            watch.failed()
            if self._stages:
                self.scheduler.take_back(batch)
            else:
                self._wait_for_work(batch)
            return False
        watch.scheduled(batch)
        try:
            self._stages.launch(batch)
        except Exception as error:
            watch.failed()
            ended += self._handle_failure(batch, error)
        else:
            watch.pause()
            self._watches.append(watch)
        return True

    def _land_oldest(self) -> list[EngineCoreOutput]:
        batch, watch = self._stages.batches[0], self._watches.popleft()
        watch.resume()
        try:
            sampled = self._stages.collect()
        except Exception as error:
            watch.failed()
            outputs = self._handle_failure(batch, error)
        else:
            outputs = self._update(batch, sampled, watch)
        self.scheduler.take_back(SchedulerOutput(released_ids=self._stages.take_released()))
        return outputs
