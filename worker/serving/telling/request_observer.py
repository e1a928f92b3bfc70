"""Who is told how each request comes to an engine and leaves it."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from ....shared.messages.deltas import Delta
from ....shared.messages.requests import EngineCoreRequest
from ..requests.generation import Generation


class Departure(enum.StrEnum):
    """How a request leaves an engine without having ended: others go on with it."""

    HANDED_BACK = "handed_back"
    ENGINE_DIED = "engine_died"
    CLAIM_STALE = "claim_stale"


class RequestObserver:
    """Told of everything that an engine has claimed and could run, once. By itself it does nothing with that."""

    async def open(self) -> None:
        """Begin; nothing was claimed yet."""

    def note_begin(self, generation: Generation, request: EngineCoreRequest) -> None:
        """It was taken up; ``request`` is what its engine gets, the prompt as token ids."""

    def note_end(self, generation: Generation, last: Delta) -> None:
        """``last`` tells the end of the request, or of a resumable one's segment."""

    def note_departure(self, generation: Generation, departure: Departure, cause: str = "") -> None:
        """It leaves without an end. ``cause`` is a sentence for people."""

    async def close(self) -> None:
        """Finish what is under way, within moments."""


class RequestObservers(RequestObserver):
    """Tells all of them."""

    def __init__(self, observers: Sequence[RequestObserver]) -> None:
        self._observers = observers

    async def open(self) -> None:
        for observer in self._observers:
            await observer.open()

    def note_begin(self, generation: Generation, request: EngineCoreRequest) -> None:
        for observer in self._observers:
            observer.note_begin(generation, request)

    def note_end(self, generation: Generation, last: Delta) -> None:
        for observer in self._observers:
            observer.note_end(generation, last)

    def note_departure(self, generation: Generation, departure: Departure, cause: str = "") -> None:
        for observer in self._observers:
            observer.note_departure(generation, departure, cause)

    async def close(self) -> None:
        for observer in self._observers:
            await observer.close()
