"""Observers of requests that arrive at an engine and leave it."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from ....shared.messages.deltas import Delta
from ....shared.messages.requests import EngineCoreRequest
from ..requests.generation import Generation


class Departure(enum.StrEnum):
    """Reason why a request leaves an engine before its end; another engine resumes it."""

    HANDED_BACK = "handed_back"
    ENGINE_DIED = "engine_died"
    CLAIM_STALE = "claim_stale"


class RequestObserver:
    """Receives the arrival and departure of each valid request that an engine claims, once. This base does nothing."""

    async def open(self) -> None:
        """Start, before the first claim."""

    def record_begin(self, generation: Generation, request: EngineCoreRequest) -> None:
        """Record an admitted request; ``request`` is passed to the core, with the prompt as token ids."""

    def record_end(self, generation: Generation, last: Delta) -> None:
        """Record the end of a request, or of a resumable request's segment; ``last`` is its last delta."""

    def record_departure(self, generation: Generation, departure: Departure, cause: str = "") -> None:
        """Record that a request leaves before its end. ``cause`` is a sentence for people."""

    async def close(self) -> None:
        """Finish pending work within a short time."""


class RequestObservers(RequestObserver):
    """Observer that forwards everything to several observers."""

    def __init__(self, observers: Sequence[RequestObserver]) -> None:
        self._observers = observers

    async def open(self) -> None:
        for observer in self._observers:
            await observer.open()

    def record_begin(self, generation: Generation, request: EngineCoreRequest) -> None:
        for observer in self._observers:
            observer.record_begin(generation, request)

    def record_end(self, generation: Generation, last: Delta) -> None:
        for observer in self._observers:
            observer.record_end(generation, last)

    def record_departure(self, generation: Generation, departure: Departure, cause: str = "") -> None:
        for observer in self._observers:
            observer.record_departure(generation, departure, cause)

    async def close(self) -> None:
        for observer in self._observers:
            await observer.close()
