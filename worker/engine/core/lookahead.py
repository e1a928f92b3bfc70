"""The engine core that schedules the next batch while the current one is computed (``--async-scheduling``).

The reasons are in ops/decisions/engine_step.md.
"""

from __future__ import annotations

from typing import Any

from ....shared.messages.core import EngineCoreOutput
from ..scheduling.batches import BatchQueue
from ..scheduling.scheduler_output import SchedulerOutput
from .engine_core import EngineCore


class LookaheadCore(EngineCore):
    """Produces the same tokens as ``EngineCore`` for the same requests.

    Args:
        batch_queue: holds the batch in flight; it uses the same executor.
        args, options: the arguments of ``EngineCore``.
    """

    def __init__(self, batch_queue: BatchQueue, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._batch_queue = batch_queue
        self.step_fn = self.step_with_batch_queue

    @property
    def has_work(self) -> bool:
        return self._batch_queue.batch is not None or super().has_work

    def step_with_batch_queue(self) -> list[EngineCoreOutput]:
        """Schedule the next batch while the current one is computed, launch it, then update the current one.

        The next batch is scheduled as if no token of the current one ended its request. If a token does, the result of
        the next batch for that request is ignored. If the current batch raises, the next one is not launched, and
        ``step`` isolates the requests.

        Raises:
            EngineDeadError: as for ``step``.
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
            self._drop(upcoming)
            return ended + self._handle_failure(batch, error)
        if upcoming.requests:
            queue.launch(upcoming)
        else:
            self._drop(upcoming)
        return ended + self._update(batch, sampled, watch)

    def settle(self) -> list[EngineCoreOutput]:
        """Wait for the batch in flight and return its outputs."""
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
        """Launch ``batch`` unless it is empty. No batch is in flight."""
        if batch.requests:
            self._batch_queue.launch(batch)
        else:
            self._wait_for_work(batch)

    def _drop(self, upcoming: SchedulerOutput) -> None:
        """Undo the schedule of ``upcoming`` instead of launching it. No batch is in flight afterwards."""
        self._batch_queue.land()
        self.scheduler.undo_schedule(upcoming)
