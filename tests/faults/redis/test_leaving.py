"""A worker that gets SIGTERM while Redis is away ends, and its requests continue later."""

from __future__ import annotations

import asyncio
import os
import signal

from penstock.ops.local.stack import LocalStack
from penstock.producer import Client

from ...gate import Gate
from ..conftest import Start
from ..watching import PARAMS, PROMPT, Watched, all_under_way, beating, finish, undisturbed

# Longer than any test may take: who waits for the end of a drain is caught.
ENDLESS = ("--drain-timeout", "900")


async def terminated(stack: LocalStack) -> int:
    """SIGTERM to the supervisor; returns its exit status once it has ended."""
    os.kill(stack.workers[0].pid, signal.SIGTERM)
    async with asyncio.timeout(150):
        return await asyncio.to_thread(stack.workers[0].await_end)


async def log_of(stack: LocalStack) -> str:
    return await asyncio.to_thread(lambda: stack.workers[0].log)


async def test_an_idle_worker_leaves_while_redis_is_away(start: Start) -> None:
    stack = await start(1, *ENDLESS)
    await asyncio.to_thread(stack.kill_redis)
    assert await terminated(stack) == 0
    assert "lease_not_released" in await log_of(stack)


async def test_a_worker_with_a_dead_core_stops_while_redis_is_away(start: Start) -> None:
    stack = await start(1, *ENDLESS, "--log-level", "debug")
    (beat,) = await beating(stack.url, 1)
    await asyncio.to_thread(stack.kill_redis)
    os.kill(beat.core_pid, signal.SIGKILL)
    async with asyncio.timeout(150):
        while '"state": "failed"' not in await log_of(stack):
            await asyncio.sleep(0.01)
    assert await terminated(stack) == 0


async def test_running_requests_resume_after_their_worker_left_while_redis_was_away(start: Start, gate: Gate) -> None:
    stack = await start(1, "--drain-timeout", "0.2", "--deterministic")
    async with Client.connect(stack.url) as client:
        whole = await undisturbed(client, PARAMS)
        gate.hold_at(30)
        watched = [Watched(client.stream(PROMPT, params)) for params in PARAMS]
        await all_under_way(watched, 20)
        await asyncio.to_thread(stack.kill_redis)
        # No process had to be killed, nor was its life line cut.
        assert await terminated(stack) == 0
        assert "exited_without_release" not in await log_of(stack)
        await asyncio.to_thread(stack.restart_redis)
        await asyncio.to_thread(stack.start_worker)
        await finish(watched, whole, gate)
