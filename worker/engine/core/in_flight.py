"""Engine cores that schedule the next batches while earlier ones are computed.

``LookaheadCore`` keeps one batch in flight (``--async-scheduling``, ops/decisions/engine_step.md). ``PipelinedCore``
keeps one in each stage of a model that is computed in stages (ops/decisions/ranks.md).
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ....shared.messages.core import EngineCoreOutput
from ..scheduling.batches import BatchQueue, StagedBatches
from ..scheduling.scheduler_output import SchedulerOutput
from .engine_core import EngineCore, StepWatch


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
        the next batch for that request is ignored. If the current batch raises, the next one is not launched, or
        discarded, and ``step`` isolates the requests.

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
        is_launched = bool(upcoming.requests) and queue.feeds_next
        if is_launched:
            queue.launch(upcoming)
        try:
            sampled = queue.collect()
        except Exception as error:
            watch.failed()
            if is_launched:
                queue.discard()
                batch = _both(batch, upcoming)
            self._drop(upcoming)
            return ended + self._handle_failure(batch, error)
        if not upcoming.requests:
            self._drop(upcoming)
        elif not is_launched:
            queue.launch(upcoming)
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


def _both(batch: SchedulerOutput, following: SchedulerOutput) -> SchedulerOutput:
    """Return the work of two batches, of which the first has failed; a request of both has that of the first."""
    work = dict(batch.work())
    work = {request: num_new_tokens for request, num_new_tokens in following.work() if request not in work} | work
    return SchedulerOutput(list(work), list(work.values()), batch.released_ids)


class PipelinedCore(EngineCore):
    """Produces the same tokens as ``EngineCore`` for the same requests.

    Args:
        stages: holds the batches in flight; the scheduler uses it, too.
        args, options: the arguments of ``EngineCore``.
    """

    def __init__(self, stages: StagedBatches, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stages = stages
        # One per batch in flight, in the same order.
        self._watches: deque[StepWatch] = deque()
        self.step_fn = self.step_with_batch_queue

    @property
    def has_work(self) -> bool:
        return len(self._stages) > 0 or super().has_work

    def step_with_batch_queue(self) -> list[EngineCoreOutput]:
        """Launch a batch of requests that are in no other batch, or wait for the oldest batch.

        It launches only if a stage is free. It returns after a launch, so that requests that have arrived meanwhile
        are in the next batch. If a batch raises, none is launched until all are complete, and then ``step`` isolates
        the requests.

        Raises:
            EngineDeadError: as for ``step``.
        """
        stages, is_isolating = self._stages, self._isolation.is_active
        if is_isolating and not stages:
            return self.step()
        ended = self._take_ready()
        may_launch = self.scheduler.has_unfinished_requests and not (is_isolating or stages.is_full)
        if may_launch and self._launch_next(ended):
            return ended
        if stages:
            ended += self._collect_oldest()
        return ended

    def settle(self) -> list[EngineCoreOutput]:
        """Wait for all batches in flight and return their outputs."""
        outputs: list[EngineCoreOutput] = []
        while self._stages:
            outputs += self._collect_oldest()
        return outputs

    def _launch_next(self, ended: list[EngineCoreOutput]) -> bool:
        """Schedule and launch a batch; return False if nothing can be computed yet.

        Args:
            ended: receives the outputs of requests that a failed launch ends.
        """
        watch = self.step_watch()
        batch = self.scheduler.schedule()
        if not batch.requests:
            watch.failed()
            if self._stages:
                self.scheduler.undo_schedule(batch)
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

    def _collect_oldest(self) -> list[EngineCoreOutput]:
        batch, watch = self._stages.batches[0], self._watches.popleft()
        watch.resume()
        try:
            sampled = self._stages.collect()
        except Exception as error:
            watch.failed()
            outputs = self._handle_failure(batch, error)
        else:
            outputs = self._update(batch, sampled, watch)
        self.scheduler.undo_schedule(SchedulerOutput(released_ids=self._stages.pop_landed_ids()))
        return outputs
