"""The engine core that schedules the next batch while one is computed (``--async-scheduling``, decision 0027)."""

from __future__ import annotations

from typing import Any

from ....shared.messages.from_core import EngineCoreOutput
from ..scheduling.batches.batch_queue import BatchQueue
from ..scheduling.scheduler_output import SchedulerOutput
from .engine_core import EngineCore


class LookaheadCore(EngineCore):
    """Makes the same tokens of the same requests as ``EngineCore``.

    Args:
        batch_queue: over the same executor.
        parts, named: the arguments of ``EngineCore``.
    """

    def __init__(self, batch_queue: BatchQueue, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        self._batch_queue = batch_queue
        self.step_fn = self.step_with_batch_queue

    @property
    def has_work(self) -> bool:
        return self._batch_queue.batch is not None or super().has_work

    def step_with_batch_queue(self) -> list[EngineCoreOutput]:
        """As ``step``, one batch ahead: schedule the next while one is computed, launch it, then update.

        The next batch is scheduled as if no token of this one ended its request; where one does, what the next computes
        for that request is passed over. If this one raises, the next is not launched, and ``step`` does the isolation.

        Raises:
            EngineDeadError: as ``step``.
        """
        queue = self._batch_queue
        if queue.batch is None and self._isolation.is_active:
            return self.step()
        ended = self._take_ready()
        if queue.batch is None:
            if self.scheduler.has_unfinished_requests:
                self._launch_first(self.scheduler.schedule())
            return ended
        watch = self.step_watch()
        batch, upcoming = queue.batch, self.scheduler.schedule()
        watch.scheduled(batch)
        try:
            sampled = queue.collect()
        except Exception as error:
            watch.failed()
            self._land(upcoming)
            return ended + self._handle_failure(batch, error)
        if upcoming.requests:
            queue.launch(upcoming)
        else:
            self._land(upcoming)
        return ended + self._update(batch, sampled, watch)

    def settle(self) -> list[EngineCoreOutput]:
        """As ``EngineCore``: wait for the batch that is in flight."""
        queue = self._batch_queue
        if queue.batch is None:
            return []
        batch = queue.batch
        try:
            sampled = queue.collect()
        except Exception as error:
            return self._handle_failure(batch, error)
        finally:
            queue.land()
        return self.scheduler.update_from_output(batch, sampled)

    def _launch_first(self, batch: SchedulerOutput) -> None:
        """Launch ``batch``, if there is anything in it; nothing is in flight."""
        if batch.requests:
            self._batch_queue.launch(batch)
        else:
            self._wait_for_work(batch)

    def _land(self, upcoming: SchedulerOutput) -> None:
        """Do without ``upcoming``: no batch is in flight then."""
        self._batch_queue.land()
        self.scheduler.take_back(upcoming)
