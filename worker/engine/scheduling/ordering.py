"""Order in which requests run."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Protocol

from .block_pool import InvariantError
from .request import Request


class OrderingPolicy(Protocol):
    """Orders requests: the lowest key goes first. Keys are unique and never change."""

    def key(self, request: Request) -> Any: ...


class FirstComeFirstServed:
    """Orders requests by arrival at this engine; a preempted request keeps its place."""

    def key(self, request: Request) -> int:
        return request.arrival_index


class Priority:
    """Orders requests by priority, the lowest number first, and by arrival at this engine among equals.

    vLLM breaks ties by ``arrival_time``. Here that is the clock of the client that sent the request, so two requests
    may share it and two clients' clocks may differ. The queue has already ordered the requests by the time they arrive.
    """

    def key(self, request: Request) -> tuple[int, int]:
        return request.priority, request.arrival_index


class ByOrderKey:
    """Orders requests by an ``order_key`` that was set on arrival, and by arrival at this engine among equals."""

    def key(self, request: Request) -> tuple[tuple[float, ...], int]:
        return request.order_key, request.arrival_index


class RequestQueue:
    """Queue of requests in the order of a policy."""

    def __init__(self, policy: OrderingPolicy) -> None:
        self._key = policy.key
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def add(self, request: Request) -> None:
        """Insert ``request`` at its place in the order."""
        insort(self._requests, request, key=self._key)

    def pop(self, index: int) -> Request:
        """Remove and return the request at ``index``: 0 goes first, -1 last."""
        return self._requests.pop(index)

    def remove(self, request: Request) -> None:
        """Remove ``request``, which is in the queue."""
        del self._requests[bisect_left(self._requests, self._key(request), key=self._key)]

    def drop_finished(self) -> None:
        """Remove every finished request."""
        self._requests = [request for request in self._requests if not request.is_finished]

    def check_invariants(self) -> None:
        """Verify the order.

        Raises:
            InvariantError: a key has changed, or two keys are equal.
        """
        if any(first >= second for first, second in pairwise(map(self._key, self._requests))):
            raise InvariantError("a queue is not in the order of its policy")
