"""When what happened to a request inside the engine core; its next output tells."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ....shared.messages.from_core import EngineCoreEvent, EngineCoreEventType
from .request import Request


class Timeline(Protocol):
    """What the scheduler tells of its requests."""

    def note(self, request: Request, event: EngineCoreEventType) -> None:
        """``event`` happens to ``request`` now."""
        ...


class ClockedTimeline:
    """Puts each event with its time into the request's ``events``; ``clock`` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def note(self, request: Request, event: EngineCoreEventType) -> None:
        request.events.append(EngineCoreEvent(event, self._clock()))


class NoTimeline:
    """Nobody wants to know."""

    def note(self, request: Request, event: EngineCoreEventType) -> None:
        pass
