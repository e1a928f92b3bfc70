"""What everything in a simulation of one model shares: its clock, its queue, its measures."""

from __future__ import annotations

from collections.abc import Callable

import simpy

from ...shared.keys import Keys
from ...shared.partitions import Layout
from .measures import Measures, Note
from .partition import Partition
from .scenario import Scenario


class World:
    """One model, whose queue has one or more partitions.

    Args:
        scenario: the part of this model.
        env: whose clock it is.
    """

    def __init__(self, url: str, scenario: Scenario, namespace: str, env: simpy.Environment) -> None:
        self.scenario = scenario
        self.round_trip_s = scenario.round_trip_ms / 1000
        self.env = env
        self.measures = Measures()
        # Called with each request that the queue has accepted, at that moment.
        self.on_accepted: Callable[[Partition, Note], None] | None = None
        # Engines that have something to do at this moment.
        self.num_computing = 0
        model, split = scenario.engines[0].model, scenario.partitions_of(scenario.engines[0].model)
        self._layout = Layout(num=split.number, num_before=split.number, spread=tuple(split.spread))
        self.partitions = [
            Partition(url, Keys(namespace), model, number, env, scenario.shards) for number in range(split.number)
        ]

    @property
    def is_away(self) -> bool:
        """Whether no Redis answers."""
        return all(partition.is_away for partition in self.partitions)

    def place(self, note: Note) -> Partition:
        """Return where a request belongs, which is noted with it."""
        note.partition = self._layout.partition_of(note.tenant, note.session or note.request_id)
        return self.partitions[note.partition]

    def close(self) -> None:
        for partition in self.partitions:
            partition.close()
