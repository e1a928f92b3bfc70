"""Redis reaches its ``maxmemory`` while requests run: all wait as if it were away, and go on when it has room."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio

from penstock.producer import Client
from penstock.shared.errors import RedisFullError

from ...gate import Gate
from ...processes import DEADLINE_S
from ..conftest import Start
from ..watching import PARAMS, PROMPT, Watched, all_under_way, beating, finish, undisturbed

NUM_HELD_TOKENS = 20
# By each engine, its supervisor and the client: longer than any of their patience with errors that are their own.
NUM_REFUSALS = 40


async def processes(url: str, number: int) -> set[tuple[str, int, int]]:
    """Return the processes of this many engines, as soon as they beat: beats end while Redis is full."""
    return {(beat.engine_id, beat.worker_pid, beat.core_pid) for beat in await beating(url, number)}


async def num_refusals(server: redis.asyncio.Redis) -> int:
    """Return the number of commands that the server refused for want of memory since its last reset."""
    return (await server.info("errorstats")).get("errorstat_OOM", {}).get("count", 0)


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_streams_wait_for_a_full_redis(start: Start, gate: Gate, num_engines: int) -> None:
    stack = await start(num_engines, "--deterministic")
    async with Client.connect(stack.url) as client, redis.asyncio.Redis.from_url(stack.url) as server:
        whole = await undisturbed(client)
        gate.hold_at(NUM_HELD_TOKENS)
        watched = [Watched(client.stream(PROMPT, params)) for params in PARAMS]
        await all_under_way(watched, NUM_HELD_TOKENS)
        before = await processes(stack.url, num_engines)

        await server.config_set("maxmemory", 1)
        gate.open()
        with pytest.raises(RedisFullError, match="maxmemory"):
            await client.generate(PROMPT, PARAMS[0])
        async with asyncio.timeout(DEADLINE_S):
            while await num_refusals(server) < NUM_REFUSALS:
                await asyncio.sleep(0.05)
        assert not any(one.task.done() for one in watched)

        await server.config_set("maxmemory", 0)
        await finish(watched, whole, gate)
        # No request was to blame.
        assert await processes(stack.url, num_engines) == before
        assert all(delta.stats.num_deliveries == 1 for one in watched for delta in one.deltas if delta.stats)
        again = await client.generate(PROMPT, PARAMS[0])
        assert again.outputs[0].token_ids == whole[0].token_ids
