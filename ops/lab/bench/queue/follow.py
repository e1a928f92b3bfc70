"""Throughput of one client process that follows many streams, whose deltas another process appends.

The other process (this module as a command) acts as an engine: it claims the requests, then appends one delta of one
token to each, one call per step, as fast as Redis permits. Its speed without a listener is measured, too, since on a
small machine appender, Redis and client share the cores.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import redis.asyncio

from .....producer import Client, RequestHandle, SamplingParams
from .....shared.broker import Broker, Claim, EngineCapacity, FinalRecord, Record
from .....shared.connection import CommandConnection
from .....shared.errors import BrokerError
from .....shared.keys import Keys
from .....shared.messages.deltas import Delta
from .....shared.messages.outcome import FinishReason
from .....shared.redis_access.url import parse_pool
from ....local.stack import private_redis

MODEL = "bench-follow"
NUM_STREAMS = 1000
DELTAS_PER_STREAM = 200
LEASE_TTL_MS = 600_000
POLL_S = 0.01
TIMEOUT_S = 60.0


class FollowRow(msgspec.Struct, kw_only=True):
    """Rates over all streams, from the first append to the last delta; ``client_cpu_s`` is the client's own time."""

    num_streams: int
    num_deltas: int
    deltas_per_s: float
    client_cpu_s: float
    appended_per_s_unheard: float

    @property
    def deltas_per_client_cpu_s(self) -> float:
        return self.num_deltas / self.client_cpu_s


def measure_follow(num_streams: int = NUM_STREAMS, deltas_per_stream: int = DELTAS_PER_STREAM) -> FollowRow:
    """Measure on a private Redis, in memory alone.

    Raises:
        BrokerError: the appender failed, or a stream did not have all its tokens.
    """
    with private_redis(append_only=False) as url:
        unheard_s = asyncio.run(_unheard(url, num_streams, deltas_per_stream))
    with private_redis(append_only=False) as url:
        wall_s, cpu_s = asyncio.run(_heard(url, num_streams, deltas_per_stream))
    num_deltas = num_streams * deltas_per_stream
    return FollowRow(
        num_streams=num_streams,
        num_deltas=num_deltas,
        deltas_per_s=num_deltas / wall_s,
        client_cpu_s=cpu_s,
        appended_per_s_unheard=num_deltas / unheard_s,
    )


async def _unheard(url: str, num_streams: int, deltas_per_stream: int) -> float:
    async with Client.connect(url, model=MODEL, wait_for_model=True) as client:
        await _submit(client, num_streams, deltas_per_stream)
        async with _appender(url, num_streams, deltas_per_stream):
            started = time.perf_counter()
        return time.perf_counter() - started


async def _heard(url: str, num_streams: int, deltas_per_stream: int) -> tuple[float, float]:
    async with Client.connect(url, model=MODEL, wait_for_model=True) as client:
        handles = await _submit(client, num_streams, deltas_per_stream)
        streams = [asyncio.create_task(_count_deltas(handle)) for handle in handles]
        await _until_subscribed(url, num_streams)
        async with _appender(url, num_streams, deltas_per_stream), asyncio.timeout(TIMEOUT_S):
            started, cpu_started = time.perf_counter(), time.process_time()
            counts = await asyncio.gather(*streams)
            wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    if set(counts) != {deltas_per_stream}:
        raise BrokerError(f"streams had {min(counts)} to {max(counts)} tokens, not {deltas_per_stream}")
    return wall_s, cpu_s


async def _submit(client: Client, num_streams: int, deltas_per_stream: int) -> list[RequestHandle]:
    return await client.submit_many([[1]] * num_streams, SamplingParams(max_tokens=deltas_per_stream))


async def _count_deltas(handle: RequestHandle) -> int:
    count = 0
    async for delta in handle.stream():
        count += len(delta.token_ids)
    return count


async def _until_subscribed(url: str, num_streams: int) -> None:
    server = redis.asyncio.Redis.from_pool(parse_pool(url))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while len(await server.pubsub_channels()) < num_streams:  # noqa: ASYNC110  # only Redis knows it
                await asyncio.sleep(POLL_S)
    finally:
        await server.aclose()


@asynccontextmanager
async def _appender(url: str, num_streams: int, deltas_per_stream: int) -> AsyncIterator[None]:
    """Begins once it has claimed all requests and is about to append, ends with it."""
    module = ("-m", "penstock.ops.lab.bench.queue.follow", url, str(num_streams), str(deltas_per_stream))
    process = await asyncio.create_subprocess_exec(sys.executable, *module, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        if await process.stdout.readline() != b"ready\n":
            raise BrokerError("the appender ended before it had appended anything")
        yield
        if await process.wait() != 0:
            raise BrokerError(f"the appender ended with {process.returncode}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _append_all(url: str, num_streams: int, deltas_per_stream: int) -> None:
    commands = CommandConnection(url)
    broker = Broker(commands, Keys().model(MODEL))
    claims: list[Claim] = []
    while len(claims) < num_streams:
        room = EngineCapacity(max_num_seqs=num_streams, num_seqs=len(claims))
        claims += (await broker.claim("bench", room, lease_ttl_ms=LEASE_TTL_MS)).claims
    print("ready", flush=True)
    for index in range(deltas_per_stream - 1):
        delta = Delta(index=index, token_ids=[4711], text=" token")
        await broker.append([Record(claim.request_id, claim.epoch, delta) for claim in claims])
    last = Delta(index=deltas_per_stream - 1, token_ids=[4711], text=".", finish_reason=FinishReason.LENGTH)
    await broker.finish([FinalRecord(claim.request_id, claim.epoch, last) for claim in claims])
    await commands.close()


if __name__ == "__main__":
    asyncio.run(_append_all(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
