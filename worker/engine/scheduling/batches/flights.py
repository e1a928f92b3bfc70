"""Interface through which the scheduler takes batches in flight into account."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ..ordering import RequestQueue
from ..request import Request


class Flights(Protocol):
    """Batches in flight; ``staged_batches.py`` has several.

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
    (``batch_queue.py``).
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
