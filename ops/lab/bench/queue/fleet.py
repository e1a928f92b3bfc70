"""Cost of a request in Redis and delay until its claim, by the number of engines; and the death of all engines.

The engines are coroutines of one process that claim, wait and finish as workers do, on a real Redis with the real
scripts. The work of the server must not depend on their number; its CPU time and calls do not depend on the driver.
Requests arrive one by one at random times, the hardest case: the fleet is idle, and one engine must be woken.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import msgspec

from .....shared.broker import Broker, Claim, EngineCapacity, FinalRecord
from .....shared.connection import CommandConnection, Subscriber
from .....shared.deployment.records import DeathCause
from .....shared.keys import Keys
from .....shared.messages.deltas import Delta
from .....shared.messages.outcome import FinishReason
from ....local.stack import private_redis
from ....statistics import percentile

NUM_ENGINES = (1, 32, 400, 1000)
REQUESTS_PER_S = 35.0
NUM_REQUESTS = 350
WATCH_S = 5.0
SERVICE_S = 0.2
MAX_NUM_SEQS = 64
LEASE_TTL_MS = 600_000
CLAIMS_PER_DEAD_ENGINE = 16
_CAUSE = DeathCause(engine_id="", reason="the benchmark let its lease end")


class FleetSize(msgspec.Struct, kw_only=True):
    """Figures for one number of engines. CPU times are the server's own.

    ``idle_cpu_share`` is that of one core without requests. ``redis_ms_per_request`` is added to that per request, from
    the enqueue to the end. Empty claims count, except for the periodic ones of idle engines.
    """

    num_engines: int
    idle_cpu_share: float
    claims_per_request: float
    redis_ms_per_request: float
    to_claim_p50_ms: float
    to_claim_p99_ms: float
    # Death of all engines with claims: time until all requests are queued again, and the longest script.
    storm_s: float
    storm_longest_ms: float


class FleetRow(msgspec.Struct, kw_only=True):
    requests_per_s: float
    claims_per_dead_engine: int
    sizes: list[FleetSize]

    @property
    def p50_ratio(self) -> float:
        """Ratio of the largest number of engines to one engine."""
        return self.sizes[-1].to_claim_p50_ms / self.sizes[0].to_claim_p50_ms

    @property
    def redis_ratio(self) -> float:
        return self.sizes[-1].redis_ms_per_request / self.sizes[0].redis_ms_per_request


def measure_fleet(num_engines: tuple[int, ...] = NUM_ENGINES, seed: int = 0) -> FleetRow:
    """Measure each number of engines on a private Redis, in memory alone."""
    sizes: list[FleetSize] = []
    for number in num_engines:
        with private_redis(append_only=False) as url:
            sizes.append(asyncio.run(_measure_engines(url, number, Random(seed))))
    return FleetRow(requests_per_s=REQUESTS_PER_S, claims_per_dead_engine=CLAIMS_PER_DEAD_ENGINE, sizes=sizes)


class _Engine:
    """Claims as ``ClaimLoop`` does, and ends each request after ``SERVICE_S``."""

    def __init__(self, engine_id: str, broker: Broker, claimed_at: dict[str, float]) -> None:
        self.engine_id = engine_id
        self.num_idle_looks = 0
        self._broker = broker
        self._claimed_at = claimed_at
        self._wake = asyncio.Event()
        self._num_held = 0
        self._ending: set[asyncio.Task[None]] = set()

    async def run(self, subscriber: Subscriber) -> None:
        await subscriber.subscribe(self._broker.keys.engine_wake(self.engine_id), self.wake)
        while True:
            self._wake.clear()
            room = EngineCapacity(max_num_seqs=MAX_NUM_SEQS, num_seqs=self._num_held)
            wave = await self._broker.claim(self.engine_id, room, lease_ttl_ms=LEASE_TTL_MS)
            for claim in wave.claims:
                self._claimed_at[claim.request_id] = time.perf_counter()
                self._num_held += 1
                task = asyncio.create_task(self._serve_claim(claim))
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
            try:
                async with asyncio.timeout(wave.wait_s):
                    await self._wake.wait()
            except TimeoutError:
                self.num_idle_looks += 1

    def wake(self, _: object = None) -> None:
        self._wake.set()

    async def _serve_claim(self, claim: Claim) -> None:
        await asyncio.sleep(SERVICE_S)
        end = Delta(index=0, token_ids=[1], finish_reason=FinishReason.STOP)
        await self._broker.finish([FinalRecord(claim.request_id, claim.epoch, end)])
        self._num_held -= 1
        self.wake()


async def _measure_engines(url: str, num_engines: int, random: Random) -> FleetSize:
    connection = CommandConnection(url)
    broker = Broker(connection, Keys().model("bench-fleet"))
    claimed_at: dict[str, float] = {}
    async with _fleet(url, connection, broker, num_engines, claimed_at) as engines:
        started, cpu_started = time.perf_counter(), await redis_cpu_s(connection)
        await asyncio.sleep(WATCH_S)
        idle_share = (await redis_cpu_s(connection) - cpu_started) / (time.perf_counter() - started)
        idle_looks = sum(engine.num_idle_looks for engine in engines)
        await connection.execute("CONFIG", "RESETSTAT")
        started, cpu_started = time.perf_counter(), await redis_cpu_s(connection)
        enqueued_at = await _send_one_by_one(broker, random)
        while len(claimed_at) < NUM_REQUESTS:  # noqa: ASYNC110  # engines say it here
            await asyncio.sleep(0.01)
        await asyncio.sleep(2 * SERVICE_S)
        wall_s, cpu_s = time.perf_counter() - started, await redis_cpu_s(connection) - cpu_started
        idle_looks = sum(engine.num_idle_looks for engine in engines) - idle_looks
        num_scripts = await _num_scripts(connection)
    storm_s, longest_ms = await _storm(connection, broker, num_engines)
    await connection.close()
    waits_ms = [1000 * (claimed_at[name] - at) for name, at in enqueued_at.items()]
    return FleetSize(
        num_engines=num_engines,
        idle_cpu_share=idle_share,
        # Each request is an enqueue and an end besides.
        claims_per_request=(num_scripts - idle_looks) / NUM_REQUESTS - 2,
        redis_ms_per_request=1000 * max(0.0, cpu_s - idle_share * wall_s) / NUM_REQUESTS,
        to_claim_p50_ms=percentile(waits_ms, 0.5),
        to_claim_p99_ms=percentile(waits_ms, 0.99),
        storm_s=storm_s,
        storm_longest_ms=longest_ms,
    )


@asynccontextmanager
async def _fleet(
    url: str, connection: CommandConnection, broker: Broker, num_engines: int, claimed_at: dict[str, float]
) -> AsyncIterator[list[_Engine]]:
    """Start ``num_engines`` engines, and wait until each has tried to claim once."""
    subscriber = Subscriber(url)
    await subscriber.open()
    engines = [_Engine(f"engine{number:04}", broker, claimed_at) for number in range(num_engines)]
    running = [asyncio.create_task(engine.run(subscriber)) for engine in engines]
    while await connection.execute("ZCARD", broker.keys.leases) < num_engines:  # noqa: ASYNC110  # only Redis knows it
        await asyncio.sleep(0.05)
    try:
        yield engines
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await subscriber.close()


async def _send_one_by_one(broker: Broker, random: Random) -> dict[str, float]:
    enqueued_at: dict[str, float] = {}
    for number in range(NUM_REQUESTS):
        await asyncio.sleep(random.expovariate(REQUESTS_PER_S))
        enqueued_at[f"r{number}"] = time.perf_counter()
        await broker.enqueue(f"r{number}", b"p" * 300, result_ttl_ms=1000, num_prompt_tokens=100, max_tokens=100)
    return enqueued_at


async def _storm(connection: CommandConnection, broker: Broker, num_engines: int) -> tuple[float, float]:
    """Let all engines die with claims. Return seconds until all requests are queued, and ms of the longest script."""
    await connection.execute("DEL", broker.keys.leases, broker.keys.prefix + "vacant")
    for number in range(num_engines * CLAIMS_PER_DEAD_ENGINE):
        await broker.enqueue(f"s{number}", b"p" * 300, result_ttl_ms=1000, num_prompt_tokens=100, max_tokens=100)
    for number in range(num_engines):
        room = EngineCapacity(max_num_seqs=CLAIMS_PER_DEAD_ENGINE)
        await broker.claim(f"engine{number:04}", room, lease_ttl_ms=LEASE_TTL_MS)
    await broker.reap(_CAUSE, max_deliveries=3, lease_ttl_ms=0)
    for number in range(num_engines):
        await connection.execute("ZADD", broker.keys.leases, 0, f"engine{number:04}")
    await connection.execute("CONFIG", "SET", "slowlog-log-slower-than", 0)
    await connection.execute("SLOWLOG", "RESET")
    started = time.perf_counter()
    while await connection.execute("ZCARD", broker.keys.leases):
        await broker.reap(_CAUSE, max_deliveries=3, lease_ttl_ms=0)
    took_s = time.perf_counter() - started
    slow = await connection.execute("SLOWLOG", "GET", 128)
    return took_s, max(micros for _, _, micros, command, *_ in slow if command[0].upper() == b"EVALSHA") / 1000


async def redis_cpu_s(connection: CommandConnection) -> float:
    """CPU seconds that a server has used since it began."""
    info = (await connection.execute("INFO", "cpu")).decode()
    return sum(float(value) for value in re.findall(r"used_cpu_(?:sys|user):([\d.]+)", info))


async def _num_scripts(connection: CommandConnection) -> int:
    match = re.search(rb"cmdstat_evalsha:calls=(\d+)", await connection.execute("INFO", "commandstats"))
    return int(match[1]) if match else 0
