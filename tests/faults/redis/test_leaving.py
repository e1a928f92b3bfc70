"""A worker that gets SIGTERM while Redis is away ends, and its requests continue later."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from contextlib import closing

from penstock.ops.local.stack import LocalStack
from penstock.producer import Client
from penstock.shared.deployment.records import EngineHeartbeat

from ...gate import Gate
from ...processes import DEADLINE_S
from ...redis_server import RedisServer
from ..conftest import Start
from ..watching import PARAMS, PROMPT, Watched, all_under_way, beating, finish, log_of, undisturbed, until_logged

# Longer than any test may take: who waits for the end of a drain is caught.
ENDLESS = ("--drain-timeout", "900")
SUBSCRIBES_TO_COMMANDS = re.compile(rb"\r\nSUBSCRIBE\r\n.*engine:[^:]+:commands\r\n", re.DOTALL | re.IGNORECASE)


async def terminated(stack: LocalStack) -> int:
    """SIGTERM to the supervisor; returns its exit status once it has ended."""
    os.kill(stack.workers[0].pid, signal.SIGTERM)
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.to_thread(stack.workers[0].await_end)


async def test_an_idle_worker_leaves_while_redis_is_away(start: Start) -> None:
    stack = await start(1, *ENDLESS)
    await asyncio.to_thread(stack.kill_redis)
    assert await terminated(stack) == 0
    assert "lease_not_released" in await log_of(stack)


class Relay:
    """A TCP relay to a Redis that forwards nothing any more once a client has subscribed to an engine's commands.

    An engine then waits in the middle of the subscriptions with which it begins to serve. ``stopped_for`` is its
    heartbeat at that moment.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._connections: set[asyncio.Task[None]] = set()
        self.stopped_for: asyncio.Future[EngineHeartbeat] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        redis_reader, redis_writer = await asyncio.open_unix_connection(self._url.removeprefix("unix://"))
        for source, target in ((reader, redis_writer), (redis_reader, writer)):
            self._connections.add(asyncio.create_task(self._forward(source, target)))

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with closing(target):
            while data := await source.read(1 << 16):
                if not self.stopped_for.done() and SUBSCRIBES_TO_COMMANDS.search(data):
                    (beat,) = await beating(self._url, 1)
                    self.stopped_for.set_result(beat)
                if self.stopped_for.done():
                    await asyncio.Event().wait()
                target.write(data)
                await target.drain()


async def test_a_core_that_dies_while_its_worker_begins_to_serve_is_noticed(server: RedisServer, start: Start) -> None:
    relay = Relay(server.url)
    async with relay as url:
        stack = await start(1, *ENDLESS, "--log-level", "debug", redis_url=url)
        beat = await relay.stopped_for
        os.kill(beat.core_pid, signal.SIGKILL)
        await until_logged(stack, '"state": "failed"')
        assert await terminated(stack) == 0


async def test_a_worker_with_a_dead_core_stops_while_redis_is_away(start: Start) -> None:
    stack = await start(1, *ENDLESS, "--log-level", "debug")
    (beat,) = await beating(stack.url, 1)
    await asyncio.to_thread(stack.kill_redis)
    os.kill(beat.core_pid, signal.SIGKILL)
    await until_logged(stack, '"state": "failed"')
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
