"""Speed of enqueueing, compared with arq's jobs one by one, and in bulk with streaQ's and with plain stream entries.

streaQ's tasks are in Redis streams, too. It enqueues many in one pipeline of a Redis function, which needs Redis 7.

No process consumes. Both sides of a pairing use the same Redis, append-only file included, the same event loop and
payloads of one size, alternate in who goes first, and start from an empty server each time. The ratio is computed per
round; its median is reported. Our side validates, encodes and checks the queue's limits, as for any caller.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
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
MIN_FUNCTIONS_VERSION = 7


class Cost(msgspec.Struct, kw_only=True):
    """Processor time of a request in microseconds, which other processes hardly affect: of the caller and of Redis."""

    client_us: float
    redis_us: float


class Way(msgspec.Struct):
    """A way to put ``count`` requests in line; ``run`` is None where its library is not installed."""

    name: str
    count: int
    run: Callable[[], Awaitable[None]] | None
    rates: list[float] = []
    costs: list[Cost] = []


class Pairing(msgspec.Struct, kw_only=True):
    """Medians over rounds: requests/s of a way and of its rival, and the ratio; None without the rival's library."""

    way: str
    rival: str
    num_requests: int
    per_s: float
    rival_per_s: float | None = None
    ratio: float | None = None
    cost: Cost | None = None
    rival_cost: Cost | None = None


class EnqueueRow(msgspec.Struct, kw_only=True):
    """Results of all pairings; ``payload_bytes`` is the size of the encoded request, and of the rivals' payloads."""

    rounds: int
    payload_bytes: int
    pairings: list[Pairing]


def measure_enqueue(rounds: int = ROUNDS, size: float = 1.0) -> EnqueueRow:
    """Measure all ways in turn on a private Redis; ``size`` scales the number of requests."""
    with private_redis(append_only=True) as url:
        return asyncio.run(_measure_ways(url, rounds, size))


async def _measure_ways(url: str, rounds: int, size: float) -> EnqueueRow:
    async with AsyncExitStack() as stack:
        server = redis.asyncio.Redis.from_pool(parse_pool(url))
        stack.push_async_callback(server.aclose)
        arq = await _connect_arq(url, stack)
        streaq = await _connect_streaq(url, server, stack)
        client = await stack.enter_async_context(Client.connect(url, model=MODEL, wait_for_model=True))
        payload = await _payload(client, server)
        pairs = [*_one_by_one(client, arq, payload, size), *_in_bulk(client, server, streaq, payload, size)]
        for number in range(rounds):
            for pair in pairs:
                for way in pair if number % 2 == 0 else reversed(pair):
                    await _run_way(way, server)
    return EnqueueRow(rounds=rounds, payload_bytes=len(payload), pairings=[_compare(*pair) for pair in pairs])


async def _run_way(way: Way, server: redis.asyncio.Redis) -> None:
    if way.run is None:
        return
    await server.flushall()
    redis_began_s, client_began_s = await _redis_seconds(server), time.process_time()
    started = time.perf_counter()
    await way.run()
    way.rates.append(way.count / (time.perf_counter() - started))
    client_s = time.process_time() - client_began_s
    redis_s = await _redis_seconds(server) - redis_began_s
    way.costs.append(Cost(client_us=1e6 * client_s / way.count, redis_us=1e6 * redis_s / way.count))


async def _redis_seconds(server: redis.asyncio.Redis) -> float:
    """Return the processor time of Redis's main thread and of those that write its file."""
    cpu = await server.info("cpu")
    return cpu["used_cpu_user"] + cpu["used_cpu_sys"]


def _median_cost(way: Way) -> Cost | None:
    if not way.costs:
        return None
    return Cost(
        client_us=statistics.median(cost.client_us for cost in way.costs),
        redis_us=statistics.median(cost.redis_us for cost in way.costs),
    )


def _compare(ours: Way, rival: Way) -> Pairing:
    measured = bool(rival.rates)
    return Pairing(
        way=ours.name,
        rival=rival.name,
        num_requests=ours.count,
        per_s=statistics.median(ours.rates),
        rival_per_s=statistics.median(rival.rates) if measured else None,
        ratio=median_ratio(ours.rates, rival.rates) if measured else None,
        cost=_median_cost(ours),
        rival_cost=_median_cost(rival),
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


def _in_bulk(
    client: Client, server: redis.asyncio.Redis, streaq: Any, payload: bytes, size: float
) -> list[tuple[Way, Way]]:
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

    async def enqueue_tasks() -> None:
        await streaq.worker.enqueue_many([streaq.enqueue(payload) for _ in range(count)])

    rivals = (
        Way("streaQ, enqueue_many", count, None if streaq is None else enqueue_tasks),
        Way(f"bare XADD, pipelines of {PIPELINE}", count, add_bare),
    )
    return [(Way("submit_many", count, submit_many), rival) for rival in rivals]


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


async def _connect_arq(url: str, stack: AsyncExitStack) -> Any:
    """Return arq with the serializer that we use, since its pickle is slower; None where it is not installed."""
    try:
        from arq.connections import RedisSettings, create_pool
    except ModuleNotFoundError:
        return None
    settings = RedisSettings(unix_socket_path=unquote(urlsplit(url).path))
    arq = await create_pool(settings, job_serializer=msgspec.msgpack.encode, job_deserializer=msgspec.msgpack.decode)
    stack.push_async_callback(arq.aclose)
    return arq


async def _connect_streaq(url: str, server: redis.asyncio.Redis, stack: AsyncExitStack) -> Any:
    """Return a task of streaQ with the same serializer; None where it is not installed, or Redis has no functions."""
    try:
        from coredis import ConnectionPool
        from coredis.connection import UnixDomainSocketLocation
        from streaq import Worker
    except ModuleNotFoundError:
        return None
    if int((await server.info("server"))["redis_version"].split(".")[0]) < MIN_FUNCTIONS_VERSION:
        return None
    pool = ConnectionPool(location=UnixDomainSocketLocation(unquote(urlsplit(url).path)), decode_responses=True)
    worker = Worker(redis_pool=pool, serializer=msgspec.msgpack.encode, deserializer=msgspec.msgpack.decode)

    async def nothing(payload: bytes) -> None:
        """Stand for a request."""

    task = worker.task(nothing)
    await stack.enter_async_context(worker)
    return task
