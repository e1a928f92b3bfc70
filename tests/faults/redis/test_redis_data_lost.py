"""Redis loses its data under live engines: they register themselves again, and serve the next requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import redis.asyncio

from penstock.ops.local.stack import LocalStack
from penstock.producer import Client
from penstock.shared.deployment.records import EngineHeartbeat
from penstock.shared.errors import RequestNotFoundError

from ...gate import Gate
from ...processes import DEADLINE_S, kill_at_once
from ..conftest import Start
from ..watching import LONG, PARAMS, PROMPT, Watched, all_under_way, beating, finish, start_streams, undisturbed


def processes(beats: list[EngineHeartbeat]) -> set[tuple[str, int, int]]:
    return {(beat.engine_id, beat.worker_pid, beat.core_pid) for beat in beats}


async def flush(stack: LocalStack) -> None:
    async with redis.asyncio.Redis.from_url(stack.url) as server:
        await server.flushall()


async def restart_without_data(stack: LocalStack) -> None:
    await asyncio.to_thread(stack.kill_redis)
    await asyncio.to_thread(stack.delete_data)
    await asyncio.to_thread(stack.restart_redis)


@pytest.mark.parametrize("lose_data", [flush, restart_without_data])
async def test_engines_serve_on(start: Start, gate: Gate, lose_data: Callable[[LocalStack], Awaitable[None]]) -> None:
    stack = await start(2, "--deterministic")
    async with Client.connect(stack.url) as client:
        whole, watched = await start_streams(client, gate)
        detached = await client.submit(PROMPT, PARAMS[0])
        before = processes(await beating(stack.url, 2))
        await lose_data(stack)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(RequestNotFoundError):
                await detached.result()
        # The client of a stream sends it again, and continues behind the tokens that it has seen.
        await finish(watched, whole, gate)
        await beating(stack.url, 2)
        async with Client.connect(stack.url) as newcomer:
            assert [output.token_ids for output in await undisturbed(newcomer)] == [one.token_ids for one in whole]

        # Reaping continues: the requests of a host that dies now are taken over.
        gate.hold_at(LONG - 1)
        watched = [Watched(client.stream(PROMPT, params)) for params in PARAMS * 2]
        await all_under_way(watched)
        beats = await beating(stack.url, 2)
        assert processes(beats) == before
        kill_at_once((beats[0].supervisor_pid, beats[0].worker_pid, beats[0].core_pid))
        await finish(watched, whole * 2, gate)
