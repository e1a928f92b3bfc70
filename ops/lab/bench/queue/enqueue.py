"""Speed of enqueueing, compared with arq's jobs one by one, and with plain stream entries in bulk.

No process consumes. Both sides of a pairing use the same Redis, append-only file included, the same event loop and
payloads of one size, alternate in who goes first, and start from an empty server each time. The ratio is computed per
round; its median is reported. Our side validates, encodes and checks the queue's limits, as for any caller.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import redis.asyncio

from .....producer import Client, SamplingParams
from .....shared.keys import Keys
from .....shared.redis_access.url import parse_pool
from ....local.stack import private_redis
from ..result import median_ratio

MODEL = "bench-enqueue"
PROMPT = "four hundred seven plus thirteen is"
PARAMS = SamplingParams(max_tokens=16)
ROUNDS = 7
NUM_TASKS = 32
NUM_SINGLE = 500
NUM_OF_TASKS = 4000
NUM_IN_BULK = 10_000
PIPELINE = 100


class Way(msgspec.Struct):
    """A way to put ``count`` requests in line; ``run`` is None where its library is not installed."""

    name: str
    count: int
    run: Callable[[], Awaitable[None]] | None
    rates: list[float] = []


class Pairing(msgspec.Struct, kw_only=True):
    """Medians over rounds: requests/s of a way and of its rival, and the ratio; None without the rival's library."""

    way: str
    rival: str
    num_requests: int
    per_s: float
    rival_per_s: float | None = None
    ratio: float | None = None


class EnqueueRow(msgspec.Struct, kw_only=True):
    """Results of all pairings; ``payload_bytes`` is the size of the encoded request, and of the rivals' payloads."""

    rounds: int
    payload_bytes: int
    pairings: list[Pairing]


def measure_enqueue(rounds: int = ROUNDS, size: float = 1.0) -> EnqueueRow:
    """Measure all ways in turn on a private Redis; ``size`` scales the number of requests."""
    with private_redis(append_only=True) as url:
        return asyncio.run(_measure_ways(url, _arq_connection(url), rounds, size))


async def _measure_ways(url: str, connecting: Awaitable[Any] | None, rounds: int, size: float) -> EnqueueRow:
    server = redis.asyncio.Redis.from_pool(parse_pool(url))
    arq = None if connecting is None else await connecting
    try:
        async with Client.connect(url, model=MODEL, wait_for_model=True) as client:
            payload = await _payload(client, server)
            pairs = [*_one_by_one(client, arq, payload, size), _in_bulk(client, server, payload, size)]
            for number in range(rounds):
                for pair in pairs:
                    for way in pair if number % 2 == 0 else reversed(pair):
                        await _run_way(way, server)
    finally:
        await server.aclose()
        if arq is not None:
            await arq.aclose()
    return EnqueueRow(rounds=rounds, payload_bytes=len(payload), pairings=[_compare(*pair) for pair in pairs])


async def _run_way(way: Way, server: redis.asyncio.Redis) -> None:
    if way.run is None:
        return
    await server.flushall()
    started = time.perf_counter()
    await way.run()
    way.rates.append(way.count / (time.perf_counter() - started))


def _compare(ours: Way, rival: Way) -> Pairing:
    measured = bool(rival.rates)
    return Pairing(
        way=ours.name,
        rival=rival.name,
        num_requests=ours.count,
        per_s=statistics.median(ours.rates),
        rival_per_s=statistics.median(rival.rates) if measured else None,
        ratio=median_ratio(ours.rates, rival.rates) if measured else None,
    )


def _one_by_one(client: Client, arq: Any, payload: bytes, size: float) -> list[tuple[Way, Way]]:
    async def submit() -> None:
        await client.submit(PROMPT, PARAMS)

    async def enqueue_job() -> None:
        await arq.enqueue_job("nothing", payload)

    pairs: list[tuple[Way, Way]] = []
    for words, num_tasks, full_count in (
        ("one at a time", 1, NUM_SINGLE),
        (f"{NUM_TASKS} tasks", NUM_TASKS, NUM_OF_TASKS),
    ):
        count = max(num_tasks, int(full_count * size))
        ours = Way(f"submit, {words}", count, _from_tasks(submit, count, num_tasks))
        rival = _from_tasks(enqueue_job, count, num_tasks) if arq is not None else None
        pairs.append((ours, Way(f"arq, {words}", count, rival)))
    return pairs


def _in_bulk(client: Client, server: redis.asyncio.Redis, payload: bytes, size: float) -> tuple[Way, Way]:
    count = max(PIPELINE, int(NUM_IN_BULK * size))
    prompts = [PROMPT] * count

    async def submit_many() -> None:
        await client.submit_many(prompts, PARAMS)

    async def add_bare() -> None:
        for start in range(0, count, PIPELINE):
            async with server.pipeline(transaction=False) as pipeline:
                for _ in range(min(PIPELINE, count - start)):
                    pipeline.xadd("bench-bare", {"request": payload})
                await pipeline.execute()

    return Way("submit_many", count, submit_many), Way(f"bare XADD, pipelines of {PIPELINE}", count, add_bare)


def _from_tasks(enqueue: Callable[[], Awaitable[None]], count: int, num_tasks: int) -> Callable[[], Awaitable[None]]:
    """Return a function that enqueues ``count`` requests from ``num_tasks`` tasks, one after the other in each."""

    async def work(own: int) -> None:
        for _ in range(own):
            await enqueue()

    async def run() -> None:
        await asyncio.gather(*(work(count // num_tasks + (i < count % num_tasks)) for i in range(num_tasks)))

    return run


async def _payload(client: Client, server: redis.asyncio.Redis) -> bytes:
    """Return the encoded request as it is stored in its lane."""
    await client.submit(PROMPT, PARAMS)
    policy = await client.queue_policy()
    lane = Keys().model(MODEL).lane(policy.default_band, "default")
    ((_, fields),) = await server.xrange(lane)
    return fields[b"request"]


def _arq_connection(url: str) -> Awaitable[Any] | None:
    """To arq, with the serializer that we use, since its pickle is slower; None where it is not installed."""
    try:
        from arq.connections import RedisSettings, create_pool
    except ModuleNotFoundError:
        return None
    settings = RedisSettings(unix_socket_path=unquote(urlsplit(url).path))
    return create_pool(settings, job_serializer=msgspec.msgpack.encode, job_deserializer=msgspec.msgpack.decode)
