"""Speed of a deep queue compared with an empty one, and memory of a queued request in Redis.

Of two models on one private Redis, one holds many requests of many tenants, the other none. The same operations run on
both in turn. Claimed requests are finished outside the timed part, so that the depths stay equal and tenants rotate.

An operation's cost is measured twice: by the caller, and by the server, which counts the time of scripts (INFO
commandstats) without the caller's share.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import msgspec
import psutil

from .....shared.broker import Broker, Claim, EngineCapacity, Entry, FinalRecord, Queue
from .....shared.connection import CommandConnection
from .....shared.deployment.records import DeathCause
from .....shared.keys import Keys
from .....shared.messages.deltas import Delta
from .....shared.messages.outcome import FinishReason
from .....shared.messages.requests import EngineCoreRequest
from .....shared.params.sampling import SamplingParams
from .....shared.queue.policy import QueuePolicy
from ....local.stack import private_redis
from ....statistics import percentile

NUM_TENANTS = 10_000
NUM_REPEATS = 500
WAVE = 16
BATCH = 128
MAX_CALLS = 4
PROMPT = "Please count from four hundred seven to four hundred twenty, in words, and say which of them are prime. " * 2
MAX_TOKENS = 64
RESULT_TTL_MS = 1000
NUM_OUTPUT_TOKENS = 16
# Expected bytes of a queued request and of a lane, rounded up, to detect a shortage before swapping begins.
EXPECTED_BYTES = 1024
EXPECTED_LANE_BYTES = 8192


class OperationCost(msgspec.Struct, kw_only=True):
    """Cost of one operation on the empty and on the full queue; ratios are full over empty, of the medians."""

    operation: str
    empty_p50_ms: float
    empty_p99_ms: float
    full_p50_ms: float
    full_p99_ms: float
    ratio: float
    empty_server_p50_us: float
    empty_server_p99_us: float
    full_server_p50_us: float
    full_server_p99_us: float
    server_ratio: float


class ScaleRow(msgspec.Struct, kw_only=True):
    """Results; ``skipped`` has the reason if nothing was measured, else ""."""

    skipped: str = ""
    num_requests: int
    num_tenants: int
    payload_bytes: int = 0
    fill_per_s: float = 0.0
    redis_bytes_per_request: float = 0.0
    operations: list[OperationCost] = []


def measure_scale(queue_depth: int, seed: int = 0, num_repeats: int = NUM_REPEATS) -> ScaleRow:
    """Fill a private Redis, without append-only file, and measure; does nothing if memory is short."""
    num_tenants = min(NUM_TENANTS, queue_depth)
    num_lanes = min(queue_depth, num_tenants * len(QueuePolicy().bands))
    free, needed = psutil.virtual_memory().available, queue_depth * EXPECTED_BYTES + num_lanes * EXPECTED_LANE_BYTES
    if free < needed:
        reason = (
            f"{queue_depth:,} requests may take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of memory are "
            "free; choose a smaller --queue-depth"
        )
        return ScaleRow(skipped=reason, num_requests=queue_depth, num_tenants=num_tenants)
    with private_redis(append_only=False) as url:
        return asyncio.run(_measure_depth(url, queue_depth, num_tenants, Random(seed), num_repeats))


async def _measure_depth(url: str, queue_depth: int, num_tenants: int, random: Random, num_repeats: int) -> ScaleRow:
    connection = CommandConnection(url)
    try:
        full, empty = (_Side(connection, name, num_tenants, random) for name in ("bench-full", "bench-empty"))
        for side in (full, empty):
            await Queue(connection, side.broker.keys).configure(QueuePolicy(max_queue_depth=None))
        before = await _used_memory(connection)
        started = time.perf_counter()
        await full.fill(queue_depth)
        fill_s = time.perf_counter() - started
        used = await _used_memory(connection) - before
        for side in (empty, full):
            await side.warm_up()
        for _ in range(num_repeats):
            for side in (empty, full):
                await side.run_once()
        return ScaleRow(
            num_requests=queue_depth,
            num_tenants=num_tenants,
            payload_bytes=len(full.payload),
            fill_per_s=queue_depth / fill_s,
            redis_bytes_per_request=used / queue_depth,
            operations=[_cost(name, empty, full) for name in full.caller_ms],
        )
    finally:
        await connection.close()


class _Side:
    """Either of the two queues, and the times of its operations."""

    def __init__(self, connection: CommandConnection, name: str, num_tenants: int, random: Random) -> None:
        self.broker = Broker(connection, Keys().model(name))
        self.caller_ms: dict[str, list[float]] = defaultdict(list)
        self.server_us: dict[str, list[float]] = defaultdict(list)
        self.payload = _payload(name)
        self._connection = connection
        self._num_tenants = num_tenants
        self._random = random
        self._bands = QueuePolicy().bands
        self._queue = Queue(connection, self.broker.keys)

    async def fill(self, count: int) -> None:
        """Put requests of all tenants in line, in turn, in all bands."""
        slots = asyncio.Semaphore(MAX_CALLS)

        async def enqueue(first: int, last: int) -> None:
            try:
                await self._enqueue([self._entry(i) for i in range(first, last)])
            finally:
                slots.release()

        async with asyncio.TaskGroup() as calls:
            for first in range(0, count, BATCH):
                await slots.acquire()
                calls.create_task(enqueue(first, min(first + BATCH, count)))

    async def warm_up(self) -> None:
        """Call each script once, because the first call sends its text."""
        for _ in range(3):
            await self.run_once()
        self.caller_ms.clear()
        self.server_us.clear()

    async def run_once(self) -> None:
        """Time each operation once, and leave the queue as deep as it was."""
        one = self._entry(self._random.randrange(self._num_tenants))
        await self._timed("enqueue 1", lambda: self._enqueue([one]))
        claims = await self._timed("claim 1", lambda: self._claim(1))
        await self._finish_claims(claims)
        many = [self._entry(i) for i in self._random.choices(range(self._num_tenants), k=WAVE)]
        await self._timed(f"enqueue {WAVE}", lambda: self._enqueue(many))
        claims = await self._timed(f"claim {WAVE}", lambda: self._claim(WAVE))
        await self._finish_claims(claims)
        one = self._entry(self._random.randrange(self._num_tenants))
        await self._enqueue([one])
        await self._timed("cancel 1", lambda: self.broker.cancel(one.request_id))
        await self._timed("reap", lambda: self.broker.reap(DeathCause(engine_id="bench", reason=""), max_deliveries=3))
        await self._timed("stats", self._queue.stats)

    async def _enqueue(self, entries: list[Entry]) -> None:
        for answer in await self.broker.enqueue_many(entries):
            if isinstance(answer, Exception):
                raise answer

    async def _claim(self, size: int) -> list[Claim]:
        claims = (await self.broker.claim("bench", EngineCapacity(max_num_seqs=size))).claims
        assert len(claims) == size, f"{len(claims)} of {size} were claimed"
        return claims

    async def _finish_claims(self, claims: list[Claim]) -> None:
        last = Delta(index=0, token_ids=[4711] * NUM_OUTPUT_TOKENS, finish_reason=FinishReason.LENGTH)
        await self.broker.finish([FinalRecord(claim.request_id, claim.epoch, last) for claim in claims])

    async def _timed(self, name: str, operation: Callable[[], Awaitable[Any]]) -> Any:
        before_us = await self._script_us()
        started = time.perf_counter()
        result = await operation()
        self.caller_ms[name].append((time.perf_counter() - started) * 1000)
        self.server_us[name].append(await self._script_us() - before_us)
        return result

    async def _script_us(self) -> int:
        """Microseconds that the server has spent in scripts so far."""
        info = (await self._connection.execute("INFO", "commandstats")).decode()
        match = re.search(r"cmdstat_evalsha:calls=\d+,usec=(\d+)", info)
        return int(match[1]) if match else 0

    def _entry(self, number: int) -> Entry:
        return Entry(
            request_id=uuid.uuid4().hex,
            payload=self.payload,
            result_ttl_ms=RESULT_TTL_MS,
            call=uuid.uuid4().hex[:16],
            tenant=f"tenant-{number % self._num_tenants}",
            band=self._bands[number // self._num_tenants % len(self._bands)],
            num_prompt_tokens=len(PROMPT) // 4,
            max_tokens=MAX_TOKENS,
        )


def _payload(model: str) -> bytes:
    request = EngineCoreRequest(
        request_id=uuid.uuid4().hex,
        sampling_params=SamplingParams(max_tokens=MAX_TOKENS, seed=2**40),
        arrival_time=time.time(),
        prompt=PROMPT,
        model=model,
        tenant="tenant-1234",
        band="standard",
    )
    return msgspec.msgpack.encode(request)


async def _used_memory(connection: CommandConnection) -> int:
    info = (await connection.execute("INFO", "memory")).decode()
    return int(re.findall(r"used_memory:(\d+)", info)[0])


def _cost(name: str, empty: _Side, full: _Side) -> OperationCost:
    sides = {"empty": empty, "full": full}
    ms = {name_of_side: side.caller_ms[name] for name_of_side, side in sides.items()}
    us = {name_of_side: side.server_us[name] for name_of_side, side in sides.items()}
    return OperationCost(
        operation=name,
        **{f"{side}_p{rank}_ms": percentile(ms[side], rank / 100) for side in sides for rank in (50, 99)},
        **{f"{side}_server_p{rank}_us": percentile(us[side], rank / 100) for side in sides for rank in (50, 99)},
        ratio=statistics.median(ms["full"]) / statistics.median(ms["empty"]),
        server_ratio=statistics.median(us["full"]) / statistics.median(us["empty"]),
    )
