"""What everything in a simulation shares: its clock, its Redis, its measures."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

import simpy

from ...shared.broker import Broker, Queue
from ...shared.keys import Keys
from .measures import Measures
from .scenario import Scenario
from .virtual_redis import EPOCH_US, VirtualConnection, run_now

T = TypeVar("T")
Process = Generator[simpy.Event, Any, None]
MODEL = "simulated"
EXPIRE_EVERY_S = 0.1


class World:
    """A Redis of its own, seen by a virtual clock. ``do`` is how anybody in it talks to Redis."""

    def __init__(self, url: str, scenario: Scenario, namespace: str) -> None:
        self.scenario = scenario
        self.round_trip_s = scenario.round_trip_ms / 1000
        self.env = simpy.Environment()
        self.keys = Keys(namespace).model(MODEL)
        self.connection = VirtualConnection(url, self.keys)
        self.broker = Broker(self.connection, self.keys)
        self.queue = Queue(self.connection, self.keys)
        self.measures = Measures()
        self._listeners: dict[str, Callable[[], None]] = {}
        self.env.process(self._expire_forever())

    def listen(self, channel: str, callback: Callable[[], None] | None) -> None:
        """Call ``callback`` whenever something is published to ``channel``; None: nobody listens any more."""
        if callback is None:
            self._listeners.pop(channel, None)
        else:
            self._listeners[channel] = callback

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        """Carry out a call of ``broker`` or ``queue`` now, and tell who listens to what it has published."""
        self._set_clock()
        reply = run_now(call)
        channels, self.connection.published = self.connection.published, []
        for channel in channels:
            if callback := self._listeners.get(channel):
                callback()
        return reply

    def close(self) -> None:
        run_now(self.connection.close())

    def _set_clock(self) -> None:
        self.connection.now_us = EPOCH_US + round(self.env.now * 1e6)

    def _expire_forever(self) -> Process:
        while True:
            yield self.env.timeout(EXPIRE_EVERY_S)
            self._set_clock()
            self.connection.expire()
