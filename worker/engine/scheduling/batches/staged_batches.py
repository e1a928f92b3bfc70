"""Batches that the stages of a model compute at the same time (``PipelinedCore.step_with_batch_queue``).

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

from ..ordering import RequestQueue
from ..request import Request
from ..scheduler_output import SampledTokens, SchedulerOutput


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
