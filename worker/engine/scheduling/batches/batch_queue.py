"""The batch that is being computed while the next one is scheduled (``LookAheadCore.step_with_batch_queue``).

The requests of a batch in flight say how many of their tokens it computes, so that the scheduler can go on from where
they will be then. Nothing else is ahead of time: a request's tokens, its grammar and its penalties change when a
batch's result has come, and inputs and tokens of a batch are made after that of the one before.
"""

from __future__ import annotations

from typing import Protocol

from ..request import Request
from ..scheduler_output import SampledTokens, SchedulerOutput


class BatchExecutor(Protocol):
    """An executor that can be left alone with a batch."""

    def launch(self, output: SchedulerOutput) -> None:
        """Begin to compute ``output``. It raises nothing: ``collect`` does."""
        ...

    def collect(self) -> SampledTokens:
        """Wait for the batch that was launched; see ``Executor.execute``."""
        ...


class BatchQueue:
    """Holds one batch; the next one is launched when its result is there."""

    def __init__(self, executor: BatchExecutor) -> None:
        self._executor = executor
        self._flying: list[Request] = []
        self.batch: SchedulerOutput | None = None

    def collect(self) -> SampledTokens:
        """Wait for ``batch``. It counts as in flight until the next one is launched, or ``land`` is called."""
        return self._executor.collect()

    def launch(self, batch: SchedulerOutput) -> None:
        """Begin with ``batch``, whose inputs follow on the result of the one before."""
        self._executor.launch(batch)
        self.land()
        self.batch, self._flying = batch, batch.requests
        for request, num_new_tokens in batch.work():
            request.num_in_flight_tokens = num_new_tokens

    def land(self) -> None:
        """Nothing is in flight any more."""
        for request in self._flying:
            request.num_in_flight_tokens = 0
        self.batch, self._flying = None, []
