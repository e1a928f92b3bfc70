"""What the scheduler asks of batches that are still being computed, before it gives their requests more to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ..ordering import RequestQueue
from ..request import Request


class Flights(Protocol):
    """Batches in flight; ``staged_batches.py`` has several.

    Attributes:
        num_leaving: requests of them that have ended meanwhile, and whose places in the executor are still theirs.
    """

    @property
    def num_leaving(self) -> int: ...

    def room(self, num_requests: int) -> int:
        """How many of so many requests the next batch may compute."""
        ...

    def free(self, running: RequestQueue, room: int) -> Iterable[Request]:
        """Those of ``running`` that may be computed, at most ``room``; it may lose requests from behind meanwhile."""
        ...

    def may_enter(self, request: Request) -> bool:
        """Whether ``request``, which waits, may be computed."""
        ...

    def may_leave(self, request: Request) -> bool:
        """Whether ``request``, which runs, may be preempted."""
        ...

    def work(self) -> Iterable[tuple[Request, int]]:
        """Requests in flight that are not free, with how many tokens they compute beyond those in flight: none."""
        ...


class OneFlight:
    """At most one batch is in flight, and what follows on it may be scheduled meanwhile (``batch_queue.py``)."""

    num_leaving = 0

    def room(self, num_requests: int) -> int:
        return num_requests

    def free(self, running: RequestQueue, room: int) -> Iterable[Request]:
        return running

    def may_enter(self, request: Request) -> bool:
        """Not while a token of it is on its way: it was preempted just now."""
        return not request.num_in_flight_tokens

    def may_leave(self, request: Request) -> bool:
        return True

    def work(self) -> Iterable[tuple[Request, int]]:
        return ()
