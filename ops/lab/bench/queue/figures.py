"""Cost of history: events of requests in time and bytes, series in bytes per day.

Events are measured in pairs: the same requests through two queues of one Redis, one of which stores none, in
alternating order, so that a drift of the machine's speed affects both. CPU time is the server's own, its append-only
file included.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics

import msgspec

from .....shared.broker import Broker, Queue
from .....shared.broker.series import HISTOGRAMS, STEPS_S, SeriesStore, TenantPoint, bucket_amounts
from .....shared.connection import CommandConnection
from .....shared.keys import Keys, ModelKeys
from .....shared.queue.policy import EVENTS_KEPT, QueuePolicy
from .....shared.stats import EngineStats
from ....local.stack import private_redis
from .costs import claim_all, enqueue_all, finish_all, memory_bytes
from .fleet import redis_cpu_s

ROUNDS = 15
NUM_REQUESTS = 512
# As a busy deployment calls, and as one that is not.
AT_ONCE = (64, 1)
NUM_TENANTS = 100
NUM_ADDITIONS = 200


class EventsCost(msgspec.Struct, kw_only=True):
    """CPU microseconds of a request that is enqueued, claimed and ended, in calls of ``at_once``; medians over pairs.

    ``share`` is the share that its events add.
    """

    at_once: int
    us_off: float
    us_on: float
    share: float


class FiguresRow(msgspec.Struct, kw_only=True):
    """CPU microseconds and bytes of Redis.

    ``series_day_bytes`` counts minutes that have every bucket and 100 tenants in them, which few have.
    """

    events: list[EventsCost]
    bytes_per_ended_off: float
    bytes_per_ended_on: float
    events_bytes: float
    events_kept: int
    series_day_bytes: float
    series_all_bytes: float
    us_per_addition: float


def measure_figures() -> FiguresRow:
    """Measure on a private Redis that writes its file every second."""
    with private_redis(append_only=True) as url:
        return asyncio.run(_measure_figures(url))


async def _measure_figures(url: str) -> FiguresRow:
    commands = CommandConnection(url)
    keys = {limit: Keys().model(f"bench-figures-{limit}") for limit in (0, EVENTS_KEPT)}
    cpu_us: dict[tuple[int, int], list[float]] = {(at_once, limit): [] for at_once in AT_ONCE for limit in keys}
    sizes: dict[int, list[float]] = {limit: [] for limit in keys}
    try:
        for limit, of in keys.items():
            await Queue(commands, of).configure(QueuePolicy(events_kept=limit))
        for number, at_once in itertools.product(range(ROUNDS + 1), AT_ONCE):
            for limit in sorted(keys, reverse=number % 2 == 0):
                took_us, size = await _round(commands, Broker(commands, keys[limit]), f"r{number}-{at_once}", at_once)
                if number:  # the first one loads the scripts
                    cpu_us[at_once, limit].append(took_us)
                    sizes[limit].append(size)
        stream_bytes = await _fill_events(commands, keys[EVENTS_KEPT])
        series = await _series_bytes(commands, keys[0])
        us_per_addition = await _additions(commands, keys[0])
    finally:
        await commands.close()
    return FiguresRow(
        events=[_cost(at_once, cpu_us[at_once, 0], cpu_us[at_once, EVENTS_KEPT]) for at_once in AT_ONCE],
        bytes_per_ended_off=statistics.median(sizes[0]),
        bytes_per_ended_on=statistics.median(sizes[EVENTS_KEPT]),
        events_bytes=stream_bytes,
        events_kept=EVENTS_KEPT,
        series_day_bytes=sum(series * 86400 / step for step in STEPS_S),
        series_all_bytes=sum(series * reach_s / step for step, reach_s in STEPS_S.items()),
        us_per_addition=us_per_addition,
    )


def _cost(at_once: int, off_us: list[float], on_us: list[float]) -> EventsCost:
    return EventsCost(
        at_once=at_once,
        us_off=statistics.median(off_us),
        us_on=statistics.median(on_us),
        share=statistics.median(on / off for on, off in zip(on_us, off_us, strict=True)) - 1,
    )


async def _round(commands: CommandConnection, broker: Broker, name: str, at_once: int) -> tuple[float, float]:
    """CPU microseconds of a request, and bytes of one that has ended; the stream of events is not in them."""
    ids = [f"{name}-{number}" for number in range(NUM_REQUESTS)]
    before_s, before = await redis_cpu_s(commands), await memory_bytes(commands)
    stream_before = await _usage(commands, broker.keys.events)
    await enqueue_all(broker, ids, at_once)
    await finish_all(broker, await claim_all(broker, len(ids), at_once), index=0, at_once=at_once)
    took_us = 1e6 * (await redis_cpu_s(commands) - before_s) / NUM_REQUESTS
    grown = await memory_bytes(commands) - before - (await _usage(commands, broker.keys.events) - stream_before)
    return took_us, grown / NUM_REQUESTS


async def _fill_events(commands: CommandConnection, keys: ModelKeys) -> float:
    """Bytes of the stream when it is full."""
    broker, number = Broker(commands, keys), 0
    while await commands.execute("XLEN", keys.events) < EVENTS_KEPT:
        ids = [f"fill{number}-{i}" for i in range(NUM_REQUESTS)]
        await enqueue_all(broker, ids)
        await finish_all(broker, await claim_all(broker, len(ids)), index=0)
        number += 1
    return await _usage(commands, keys.events)


def _full_minute() -> tuple[dict[str, int], dict[str, TenantPoint]]:
    amounts = {"tokens_in": 1000, "tokens_out": 100_000, "ended:finished": 1000, "ended:cancelled": 10}
    stats = EngineStats()
    for name in HISTOGRAMS:
        histogram = getattr(stats, name)
        for bound in (*histogram.bounds, 2 * histogram.bounds[-1]):
            histogram.observe(bound, 1000)
        amounts |= bucket_amounts(name, histogram, None)
    tenants = {
        f"customer-{number}": TenantPoint(tokens_in=1000, tokens_out=9999, requests=50) for number in range(NUM_TENANTS)
    }
    return amounts, tenants


async def _series_bytes(commands: CommandConnection, keys: ModelKeys) -> float:
    """Bytes of one step of a series that has everything in it."""
    amounts, tenants = _full_minute()
    store = SeriesStore(commands, keys)
    await store.add("size", 1, amounts, tenants)
    last = (await store.read(hours=1, step_s=3600))[-1]
    return await _usage(commands, keys.series(3600, int(last.at)))


async def _additions(commands: CommandConnection, keys: ModelKeys) -> float:
    """CPU microseconds of one addition of an engine that ten tenants use, in all three series."""
    amounts, tenants = _full_minute()
    few = dict(list(tenants.items())[:10])
    store, before_s = SeriesStore(commands, keys), await redis_cpu_s(commands)
    for number in range(1, NUM_ADDITIONS + 1):
        await store.add("time", number, amounts, few)
    return 1e6 * (await redis_cpu_s(commands) - before_s) / NUM_ADDITIONS


async def _usage(commands: CommandConnection, key: str) -> float:
    return float(await commands.execute("MEMORY", "USAGE", key, "SAMPLES", 0) or 0)
