"""The batch that is computed while the next one is scheduled (``LookaheadCore.step_with_batch_queue``).

The requests of a batch in flight record how many of their tokens it computes, so that the scheduler can continue from
the state after it. Nothing else is ahead of time: a request's tokens, grammar and penalties change when a batch's
result arrives, and the inputs and tokens of a batch are prepared after the result of the previous batch.
"""

from __future__ import annotations

from typing import Protocol

from ..request import Request
from ..scheduler_output import SampledTokens, SchedulerOutput


class BatchExecutor(Protocol):
    """An executor that computes a batch in the background."""

    def launch(self, output: SchedulerOutput) -> None:
        """Begin to compute ``output``. Raises nothing; ``collect`` raises the errors."""
        ...

    def collect(self) -> SampledTokens:
        """Wait for the launched batch; see ``Executor.execute``."""
        ...


class BatchQueue:
    """Holds one batch; the next one is launched when its result has arrived."""

    def __init__(self, executor: BatchExecutor) -> None:
        self._executor = executor
        self._in_flight: list[Request] = []
        self.batch: SchedulerOutput | None = None

    def collect(self) -> SampledTokens:
        """Wait for ``batch``. It counts as in flight until the next one is launched, or ``land`` is called."""
        return self._executor.collect()

    def launch(self, batch: SchedulerOutput) -> None:
        """Begin to compute ``batch``. Its inputs depend on the result of the previous batch."""
        self._executor.launch(batch)
        self.land()
        self.batch, self._in_flight = batch, batch.requests
        for request, num_new_tokens in batch.work():
            request.num_in_flight_tokens = num_new_tokens

    def land(self) -> None:
        """Mark the batch as no longer in flight."""
        for request in self._in_flight:
            request.num_in_flight_tokens = 0
        self.batch, self._in_flight = None, []
