"""Batches in flight while the next ones are scheduled, and batches that failed.

``BatchQueue`` holds the batch that is computed while the next one is scheduled
(``LookaheadCore.step_with_batch_queue``).

The requests of a batch in flight record how many of their tokens it computes, so that the scheduler can continue from
the state after it. Nothing else is ahead of time: a request's tokens, grammar and penalties change when a batch's
result arrives. The inputs of a batch are prepared after the result of the previous one, or before it on a device that
keeps the tokens of the previous batch (``FeedingRunner``).

``StagedBatches`` holds batches that the stages of a model compute at the same time
(``PipelinedCore.step_with_batch_queue``).

The batches share no request, because a request's next token depends on the previous one, which comes from the last
stage. So the running requests are spread evenly over as many batches as there are stages, and each batch continues when
it has left the last stage.

Every stage computes the batches in the order in which they were launched. So blocks that a batch has freed, because its
request was aborted in flight, may be allocated to the next batch immediately: each stage writes to them for the earlier
batch first. A request's row in the executor must stay until its batch has landed, because the result is recorded there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from .ordering import RequestQueue
from .request import Request, RequestStatus
from .scheduler_output import SampledTokens, SchedulerOutput


class Flights(Protocol):
    """Batches in flight; ``StagedBatches`` has several.

    Attributes:
        num_leaving: requests in flight that have ended but still hold their rows in the executor.
    """

    @property
    def num_leaving(self) -> int: ...

    def room(self, num_requests: int) -> int:
        """Return how many of ``num_requests`` requests the next batch may compute."""
        ...

    def free(self, running: RequestQueue, room: int) -> Iterable[Request]:
        """Return at most ``room`` requests of ``running`` that may be computed. ``running`` may lose its last requests
        during the iteration."""
        ...

    def may_enter(self, request: Request) -> bool:
        """Return whether ``request``, which waits, may be computed."""
        ...

    def may_preempt(self, request: Request) -> bool:
        """Return whether ``request``, which runs, may be preempted."""
        ...

    def work(self) -> Iterable[tuple[Request, int]]:
        """Return requests in flight that cannot be scheduled, each with 0 further tokens."""
        ...


class OneFlight:
    """Allows at most one batch in flight; its requests may be scheduled for the next one meanwhile
    (``BatchQueue``).
    """

    num_leaving = 0

    def room(self, num_requests: int) -> int:
        return num_requests

    def free(self, running: RequestQueue, room: int) -> Iterable[Request]:
        return running

    def may_enter(self, request: Request) -> bool:
        """Return False while a token is in flight, since ``request`` was just preempted."""
        return not request.num_in_flight_tokens

    def may_preempt(self, request: Request) -> bool:
        return True

    def work(self) -> Iterable[tuple[Request, int]]:
        return ()


class BatchExecutor(Protocol):
    """An executor that computes a batch in the background."""

    @property
    def feeds_next(self) -> bool:
        """Whether the next batch may be launched before the launched one is collected."""
        ...

    def launch(self, output: SchedulerOutput) -> None:
        """Begin to compute ``output``. Raises nothing; ``collect`` raises the errors."""
        ...

    def collect(self) -> SampledTokens:
        """Wait for the oldest launched batch; see ``Executor.execute``."""
        ...

    def discard(self) -> None:
        """Forget the launched batches, because the one before them has failed."""
        ...


class BatchQueue:
    """Holds one batch, the last one launched.

    Attributes:
        feeds_next: whether the next batch may be launched before ``collect``.
    """

    def __init__(self, executor: BatchExecutor) -> None:
        self._executor = executor
        self._in_flight: list[Request] = []
        self.batch: SchedulerOutput | None = None

    @property
    def feeds_next(self) -> bool:
        return self._executor.feeds_next

    def collect(self) -> SampledTokens:
        """Wait for the oldest batch that was launched. It counts as in flight until the next one is launched, or
        ``land`` is called.
        """
        return self._executor.collect()

    def discard(self) -> None:
        """Forget the batch, because the one before it has failed. It counts as in flight until ``land`` is called."""
        self._executor.discard()

    def launch(self, batch: SchedulerOutput) -> None:
        """Begin to compute ``batch``. Its inputs depend on the result of the previous batch, which is collected before
        unless it feeds the next.
        """
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


class StagedExecutor(Protocol):
    """An executor that computes several batches at the same time."""

    def launch(self, output: SchedulerOutput) -> None:
        """Begin to compute ``output``, which shares no request with batches in flight.

        Raises:
            EngineDeadError: a rank is lost.
            Exception: the batch was not launched.
        """
        ...

    def collect(self) -> SampledTokens:
        """Wait for the oldest batch in flight; see ``Executor.execute``."""
        ...


class StagedBatches:
    """Holds up to ``num_stages`` batches. Implements ``Flights`` for a model that is computed in stages."""

    def __init__(self, executor: StagedExecutor, num_stages: int) -> None:
        self._executor = executor
        self._num_stages = num_stages
        self._batches: deque[SchedulerOutput] = deque()
        self._in_flight: dict[str, Request] = {}
        # Requests that ended in flight: their rows are released after their batch has landed.
        self._held_ids: list[str] = []

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def is_full(self) -> bool:
        return len(self._batches) == self._num_stages

    @property
    def batches(self) -> list[SchedulerOutput]:
        """Batches in flight, the oldest first."""
        return list(self._batches)

    def launch(self, batch: SchedulerOutput) -> None:
        """Launch ``batch``. Raises as ``StagedExecutor``; the batch is in flight unless this raises."""
        self._held_ids += [name for name in batch.released_ids if name in self._in_flight]
        batch.released_ids = [name for name in batch.released_ids if name not in self._in_flight]
        self._executor.launch(batch)
        self._batches.append(batch)
        for request, num_new_tokens in batch.work():
            request.num_in_flight_tokens = num_new_tokens
            self._in_flight[request.request_id] = request

    def collect(self) -> SampledTokens:
        """Wait for the oldest batch; it has landed, whether or not this raises."""
        try:
            return self._executor.collect()
        finally:
            for request in self._batches.popleft().requests:
                request.num_in_flight_tokens = 0
                del self._in_flight[request.request_id]

    def pop_landed_ids(self) -> list[str]:
        """Return and forget the requests that ended in flight and have landed."""
        landed = [name for name in self._held_ids if name not in self._in_flight]
        self._held_ids = [name for name in self._held_ids if name in self._in_flight]
        return landed

    @property
    def num_leaving(self) -> int:
        return sum(request.is_finished for request in self._in_flight.values())

    def room(self, num_requests: int) -> int:
        """Return an even share of all requests and of those that are in no batch, so that no stage has all of them
        while others have none."""
        num_free = max(0, num_requests - len(self._in_flight) + self.num_leaving)
        num_batches = max(1, self._num_stages - len(self._batches))
        return min(-(-num_requests // self._num_stages), -(-num_free // num_batches))

    def free(self, running: RequestQueue, room: int) -> Iterator[Request]:
        num_yielded = 0
        for request in running:
            if num_yielded == room:
                return
            if request.request_id not in self._in_flight:
                num_yielded += 1
                yield request

    def may_enter(self, request: Request) -> bool:
        """Compare ids, because a request that ended in flight may have been sent again."""
        return request.request_id not in self._in_flight

    def may_preempt(self, request: Request) -> bool:
        return request.request_id not in self._in_flight

    def work(self) -> Iterable[tuple[Request, int]]:
        return ((request, 0) for request in self._in_flight.values())


class Isolation:
    """Requests of a failed batch that have not been tried separately yet.

    A failed step has no lasting effect: tokens are counted when it succeeds, and slots of the KV cache may be written
    twice. So each request computes the same tokens again, without draft tokens. Nothing may be scheduled before all
    have been tried, since the work of each request assumes the blocks that it had.
    """

    def __init__(self) -> None:
        self._suspects: deque[tuple[Request, int]] = deque()
        self._released_ids: list[str] = []

    @property
    def is_active(self) -> bool:
        """Whether requests are left to try."""
        return bool(self._suspects)

    def isolate(self, batch: SchedulerOutput) -> None:
        """Split a failed batch into single requests."""
        self._suspects.extend(zip(batch.requests, batch.num_known_tokens(), strict=True))
        self._released_ids = self._released_ids + batch.released_ids

    def next_batch(self) -> SchedulerOutput | None:
        """Return a batch of the next request; None when all have been tried. Skip requests that no longer run."""
        while self._suspects:
            request, num_new_tokens = self._suspects.popleft()
            if request.status is RequestStatus.RUNNING:
                released_ids, self._released_ids = self._released_ids, []
                return SchedulerOutput([request], [num_new_tokens], released_ids)
        return None
