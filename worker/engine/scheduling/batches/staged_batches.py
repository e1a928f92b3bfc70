"""The batches that the stages of a model compute at once (``PipelinedCore.step_with_batch_queue``).

They share no request: a request's next token needs the one before, which the last stage has not made yet. So what runs
is spread over as many batches as there are stages, evenly, and each goes on when it has come out behind the last one.

Batches come out in the order in which they went in, and every stage computes them in that order. So blocks that a batch
has given up, since its request was aborted in flight, may be given to the next one at once: each stage writes to them
for this one first. A request's row in the executor is another matter, since the result is yet to be noted there: it is
kept until the batch has landed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from ..ordering import RequestQueue
from ..request import Request
from ..scheduler_output import SampledTokens, SchedulerOutput


class StagedExecutor(Protocol):
    """An executor that computes several batches at once."""

    def launch(self, output: SchedulerOutput) -> None:
        """Begin to compute ``output``, which shares no request with what was begun before.

        Raises:
            EngineDeadError: a rank is lost.
            Exception: nothing was begun.
        """
        ...

    def collect(self) -> SampledTokens:
        """Wait for the oldest batch that was launched; see ``Executor.execute``."""
        ...


class StagedBatches:
    """Holds up to ``num_stages`` batches; the ``Flights`` of an engine whose model is computed in stages."""

    def __init__(self, executor: StagedExecutor, num_stages: int) -> None:
        self._executor = executor
        self._num_stages = num_stages
        self._batches: deque[SchedulerOutput] = deque()
        self._flying: dict[str, Request] = {}
        # Ended in flight: their rows are given back when they have landed.
        self._held_ids: list[str] = []

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def is_full(self) -> bool:
        return len(self._batches) == self._num_stages

    @property
    def batches(self) -> list[SchedulerOutput]:
        """Those in flight, the oldest first."""
        return list(self._batches)

    def launch(self, batch: SchedulerOutput) -> None:
        """Begin with ``batch``. Raises as ``StagedExecutor``; it is in flight if nothing is raised."""
        self._held_ids += [name for name in batch.released_ids if name in self._flying]
        batch.released_ids = [name for name in batch.released_ids if name not in self._flying]
        self._executor.launch(batch)
        self._batches.append(batch)
        for request, num_new_tokens in batch.work():
            request.num_in_flight_tokens = num_new_tokens
            self._flying[request.request_id] = request

    def collect(self) -> SampledTokens:
        """Wait for the oldest batch; it has landed, whether or not this raises."""
        try:
            return self._executor.collect()
        finally:
            for request in self._batches.popleft().requests:
                request.num_in_flight_tokens = 0
                del self._flying[request.request_id]

    def take_released(self) -> list[str]:
        """Return which of the requests that ended in flight have landed."""
        landed = [name for name in self._held_ids if name not in self._flying]
        self._held_ids = [name for name in self._held_ids if name in self._flying]
        return landed

    @property
    def num_leaving(self) -> int:
        return sum(request.is_finished for request in self._flying.values())

    def room(self, num_requests: int) -> int:
        """An even share, of them all and of those that are in no batch, so that no stage has all of them while others
        have none."""
        num_free = max(0, num_requests - len(self._flying) + self.num_leaving)
        num_batches = max(1, self._num_stages - len(self._batches))
        return min(-(-num_requests // self._num_stages), -(-num_free // num_batches))

    def free(self, running: RequestQueue, room: int) -> Iterator[Request]:
        num_found = 0
        for request in running:
            if num_found == room:
                return
            if request.request_id not in self._flying:
                num_found += 1
                yield request

    def may_enter(self, request: Request) -> bool:
        """By its name: one that has ended in flight may have come again."""
        return request.request_id not in self._flying

    def may_leave(self, request: Request) -> bool:
        return request.request_id not in self._flying

    def work(self) -> Iterable[tuple[Request, int]]:
        return ((request, 0) for request in self._flying.values())
