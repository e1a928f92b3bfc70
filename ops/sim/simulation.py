"""Runs a scenario from its start to its end."""

from __future__ import annotations

import time

import msgspec

from ...shared.queue_stats import QueueStats
from .clients import begin_clients
from .fleet import Fleet
from .measures import WINDOW_S, Measures, Sample
from .scenario import Scenario
from .world import Process, World

SAMPLE_EVERY_S = 0.25


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation has seen. ``queue`` is Redis's word at its end; ``wall_s`` is real time, all else virtual."""

    scenario: Scenario
    measures: Measures
    queue: QueueStats
    num_calls: dict[str, int]
    wall_s: float


def simulate(url: str, scenario: Scenario, namespace: str = "sim") -> Simulated:
    """Simulate a scenario in an empty namespace of a Redis. The same scenario gives the same, but for ``wall_s``."""
    started = time.perf_counter()
    world = World(url, scenario, namespace)
    try:
        fleet = Fleet(world)
        fleet.begin()
        begin_clients(world)
        world.env.process(_sample_forever(world, fleet))
        world.env.process(_weigh_forever(world))
        world.env.run(until=scenario.duration_s)
        return Simulated(
            scenario=scenario,
            measures=world.measures,
            queue=world.do(world.queue.stats()),
            num_calls=dict(sorted(world.connection.num_calls.items())),
            wall_s=time.perf_counter() - started,
        )
    finally:
        world.close()


def _sample_forever(world: World, fleet: Fleet) -> Process:
    measures = world.measures
    while True:
        engines = fleet.engines.values()
        measures.samples.append(
            Sample(
                at_s=world.env.now,
                num_waiting=len(measures.waiting),
                num_running=sum(len(engine.running) for engine in engines),
                num_engines=len(engines),
                num_wanted=fleet.num_wanted,
            )
        )
        if (oldest := measures.oldest) is None:
            with_room = []
        else:
            with_room = [engine.engine_id for engine in engines if engine.has_room_for(oldest)]
        measures.note_room(world.env.now, with_room)
        yield world.env.timeout(SAMPLE_EVERY_S)


def _weigh_forever(world: World) -> Process:
    while True:
        yield world.env.timeout(WINDOW_S)
        world.measures.note_window(world.env.now)
