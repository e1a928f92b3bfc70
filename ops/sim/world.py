"""Shared state of the simulation of one model: clock, queue and measurements."""

from __future__ import annotations

from collections.abc import Callable

import simpy

from ...shared.keys import Keys
from ...shared.partitions import Layout
from .measures import Measures, Note
from .partition import Partition
from .scenario import Scenario


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
