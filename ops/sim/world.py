"""Shared state of the simulation of one model: clock, measurements, and queues in a Redis under that clock."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

import simpy

from ...shared.broker import Broker, Queue
from ...shared.errors import BrokerError
from ...shared.keys import Keys
from ...shared.partitions import Layout
from ...shared.queue.stats import QueueStats
from .measures import Measures, Note
from .scenario import Scenario, Shard
from .virtual_redis import EPOCH_US, VirtualConnection, run_now

T = TypeVar("T")
Process = Generator[simpy.Event, Any, None]
EXPIRE_EVERY_S = 0.1


class World:
    """A simulated model, whose queue has one or more partitions.

    Args:
        scenario: the part of the scenario for this model.
        env: SimPy environment with the clock.
    """

    def __init__(self, url: str, scenario: Scenario, namespace: str, env: simpy.Environment) -> None:
        self.scenario = scenario
        self.round_trip_s = scenario.round_trip_ms / 1000
        self.env = env
        self.measures = Measures()
        # Called with each request when the queue accepts it.
        self.on_accepted: Callable[[Partition, Note], None] | None = None
        # Engines that are computing now.
        self.num_computing = 0
        model, split = scenario.engines[0].model, scenario.partitions_of(scenario.engines[0].model)
        self._layout = Layout(num=split.number, num_before=split.number, spread=tuple(split.spread))
        self.partitions = [
            Partition(url, Keys(namespace), model, number, env, scenario.shards) for number in range(split.number)
        ]

    @property
    def is_away(self) -> bool:
        """Whether no Redis is reachable."""
        return all(partition.is_away for partition in self.partitions)

    def place(self, note: Note) -> Partition:
        """Return the partition of a request, and store it in the request."""
        note.partition = self._layout.partition_of(note.tenant, note.session or note.request_id)
        return self.partitions[note.partition]

    def close(self) -> None:
        for partition in self.partitions:
            partition.close()


class Partition:
    """A queue. All calls of a simulation go through ``do``.

    Args:
        number: number of the partition within its model.
        shards: shards of the scenario. The one that names this queue says when its Redis is unreachable.
    """

    def __init__(
        self, url: str, keys: Keys, model: str, number: int, env: simpy.Environment, shards: list[Shard]
    ) -> None:
        self.number = number
        self.env = env
        self.keys = keys.model(model, number)
        self.connection = VirtualConnection(url, self.keys)
        self.broker = Broker(self.connection, self.keys, number)
        self.queue = Queue(self.connection, self.keys)
        self._listeners: dict[str, Callable[[], None]] = {}
        self._back: simpy.Event | None = None
        self.env.process(self._expire_forever())
        for shard in shards:
            if shard.away_at_s is not None and self.keys.name in shard.models:
                self.env.process(self._go_away(shard.away_at_s, shard.away_for_s))

    @property
    def is_away(self) -> bool:
        """Whether its Redis is unreachable."""
        return self._back is not None

    def redis(self) -> Process:
        """Wait until Redis is reachable; usually it is."""
        while self._back is not None:
            yield self._back

    def listen(self, channel: str, callback: Callable[[], None] | None) -> None:
        """Call ``callback`` for each message published to ``channel``; None unsubscribes."""
        if callback is None:
            self._listeners.pop(channel, None)
        else:
            self._listeners[channel] = callback

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call of ``broker`` or ``queue`` now, and call the subscribers of the channels that it publishes to.

        Raises:
            BrokerError: Redis is unreachable; wait for ``redis`` first.
        """
        if self.is_away:
            call.close()
            raise BrokerError("a part of the simulator called an unreachable Redis")
        self._set_clock()
        reply = run_now(call)
        channels, self.connection.published = self.connection.published, []
        for channel in channels:
            if callback := self._listeners.get(channel):
                callback()
        return reply

    def stats(self) -> QueueStats:
        """Return the final stats of Redis, even if it counts as unreachable."""
        self._back = None
        return self.do(self.queue.stats())

    def close(self) -> None:
        run_now(self.connection.close())

    def _set_clock(self) -> None:
        self.connection.now_us = EPOCH_US + round(self.env.now * 1e6)

    def _go_away(self, at_s: float, for_s: float) -> Process:
        yield self.env.timeout(at_s)
        back = self._back = self.env.event()
        yield self.env.timeout(for_s)
        self._back = None
        back.succeed()

    def _expire_forever(self) -> Process:
        while True:
            yield self.env.timeout(EXPIRE_EVERY_S)
            self._set_clock()
            self.connection.expire()
