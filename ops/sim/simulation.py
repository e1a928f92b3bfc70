"""Simulation of a scenario."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import msgspec
import simpy

from .clients import begin_clients
from .devices import Devices, SwapLog
from .fleet import Fleet
from .measures import WINDOW_S, Measures, Note, Sample
from .scenario import Scenario
from .world import Partition, Process, World

SAMPLE_EVERY_S = 0.25


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a simulation. ``wall_s`` is real time, all other times are virtual.

    According to Redis, ``num_known`` requests wait or run at the end. For ``num_warm`` requests an engine had the
    session cached, and ``num_warm_kept`` of them ran on it. ``swap_logs`` are those of engines with several models. For
    at most ``longest_neglect_s`` a model had waiting requests while one of these was free to wake it.
    """

    scenario: Scenario
    measures: Measures
    swap_logs: list[SwapLog]
    longest_neglect_s: float
    num_known: int
    num_warm: int
    num_warm_kept: int
    num_calls: dict[str, int]
    wall_s: float


def simulate(
    url: str,
    scenario: Scenario,
    namespace: str = "sim",
    on_accepted: Callable[[Partition, Note], None] | None = None,
) -> Simulated:
    """Simulate a scenario in an empty namespace of a Redis. Equal scenarios give equal results, except for ``wall_s``.

    ``on_accepted`` is called with each request when a queue accepts it.

    Models share a clock and nothing else, on whichever shards they are: one server holds them all here, since each of
    its scripts takes no virtual time.
    """
    started = time.perf_counter()
    env = simpy.Environment()
    worlds: list[World] = []
    try:
        fleets: dict[str, Fleet] = {}
        for model in scenario.models:
            worlds.append(World(url, scenario.part(model), namespace, env))
            worlds[-1].on_accepted = on_accepted
            fleets[model] = _begin_simulation(worlds[-1])
        devices = Devices(env, scenario, fleets)
        env.run(until=scenario.duration_s)
        swap_logs = devices.end()
        partitions = [partition for world in worlds for partition in world.partitions]
        queues = [partition.stats() for partition in partitions]
        calls = sum((Counter(partition.connection.num_calls) for partition in partitions), Counter())
        return Simulated(
            scenario=scenario,
            measures=Measures.of_all([world.measures for world in worlds]),
            swap_logs=swap_logs,
            longest_neglect_s=devices.longest_neglect_s,
            num_known=sum(queue.depth + queue.num_running for queue in queues),
            num_warm=sum(queue.num_warm for queue in queues),
            num_warm_kept=sum(queue.num_warm_kept for queue in queues),
            num_calls=dict(sorted(calls.items())),
            wall_s=time.perf_counter() - started,
        )
    finally:
        for world in worlds:
            world.close()


def _begin_simulation(world: World) -> Fleet:
    fleet = Fleet(world)
    fleet.begin()
    begin_clients(world)
    world.env.process(_sample_forever(world, fleet))
    world.env.process(_weigh_forever(world))
    return fleet


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
        if world.is_away or (oldest := measures.oldest) is None:
            with_room = []
        else:
            with_room = [engine.engine_id for engine in engines if engine.has_room_for(oldest)]
        measures.record_capacity(world.env.now, with_room)
        yield world.env.timeout(SAMPLE_EVERY_S)


def _weigh_forever(world: World) -> Process:
    while True:
        yield world.env.timeout(WINDOW_S)
        world.measures.record_window(world.env.now)
