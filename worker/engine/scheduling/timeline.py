"""Times of a request's events inside the engine core, which its next output carries."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ....shared.messages.from_core import EngineCoreEvent, EngineCoreEventType
from .request import Request


class Timeline(Protocol):
    """Receives the scheduler's events."""

    def record(self, request: Request, event: EngineCoreEventType) -> None:
        """Record that ``event`` happens to ``request`` now."""
        ...


class ClockedTimeline:
    """Appends each event with its time to the request's ``events``; ``clock`` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def record(self, request: Request, event: EngineCoreEventType) -> None:
        request.events.append(EngineCoreEvent(event, self._clock()))


class NoTimeline:
    """Records nothing."""

    def record(self, request: Request, event: EngineCoreEventType) -> None:
        pass
