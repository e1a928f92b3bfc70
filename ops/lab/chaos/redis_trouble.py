"""Faults of Redis in a chaos run: it is killed, paused, full, loses its data, or fails over.

With shards the faults affect one of them or the home server, and models are moved.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import psutil
import redis.asyncio
from redis.exceptions import RedisError

from ....shared.errors import PenstockError
from ....shared.keys import Keys
from ....shared.process.log import get_logger
from ....shared.redis_access.url import parse_pool
from ....shared.shards import HOME, ShardMover, make_servers, recorded_places
from ...local.stack import LocalStack
from ..clusters.sentinel_trio import SentinelTrio

AWAY_S = (0.1, 2.0)
FULL_S = (0.1, 4.0)
# Of a move that servers in trouble refuse, on a machine of any speed.
MOVE_PATIENCE_S = 300.0
# A move of a small queue takes some hundredths of a second.
MOVE_S = (0.0, 0.1)

# Returns whether it was done.
Action = Callable[[], Awaitable[bool]]

log = get_logger(__name__)


class RedisTrouble:
    """Actions on Redis, by name and weight; ``kills`` are those that end a process.

    Args:
        trio: the servers if Redis is a primary with Sentinels.
        loses_data: whether Redis may lose all its data.
    """

    kills = frozenset({"restart redis", "kill primary"})

    def __init__(self, stack: LocalStack, random: Random, trio: SentinelTrio | None, *, loses_data: bool) -> None:
        self._stack = stack
        self._random = random
        self._trio = trio
        self._failing_over: asyncio.Task[None] | None = None
        # Actions that must happen, since options requested them.
        self.asked_for: list[str] = []
        self.actions: dict[str, tuple[int, Action]] = {
            "cut connections": (2, self._cut_connections),
            "fill redis": (1, self._fill),
        }
        if trio is None:
            self.actions |= {"restart redis": (1, self._restart), "stop redis": (1, self._suspend_server)}
        else:
            self.actions["kill primary"] = (3, self._kill_primary)
            self.asked_for.append("kill primary")
        if stack.shards:
            self.actions["move model"] = (3, self._move)
            self.asked_for.append("move model")
        if loses_data:
            self.actions["lose data"] = (2, self._lose_data)
            self.asked_for.append("lose data")

    async def settle(self) -> None:
        """Wait until the servers are as they were."""
        if self._failing_over is not None:
            await self._failing_over
        if self._stack.shards:
            await self._end_moves()

    async def _restart(self) -> bool:
        name = self._any()
        self._stack.kill_redis(name)
        await asyncio.sleep(self._random.uniform(*AWAY_S))
        await asyncio.to_thread(self._stack.restart_redis, name)
        return True

    async def _suspend_server(self) -> bool:
        server = psutil.Process(self._stack.redis_pid(self._any()))
        server.suspend()
        try:
            await asyncio.sleep(self._random.uniform(*AWAY_S))
        finally:
            server.resume()
        return True

    async def _kill_primary(self) -> bool:
        """Begin a failover; engines and workers die meanwhile as ever. There is one at a time."""
        if self._trio is None or (self._failing_over is not None and not self._failing_over.done()):
            return False
        self._failing_over = asyncio.create_task(asyncio.to_thread(_fail_over, self._trio))
        return True

    async def _cut_connections(self) -> bool:
        """Cut all connections, so that every client, worker and supervisor must reconnect."""
        kinds = ("normal", "pubsub")
        replies = await self._run_commands(
            self._any(), *[("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes") for kind in kinds]
        )
        return any(replies)

    async def _fill(self) -> bool:
        """Fill the memory. Return whether any write was refused; if none was, nothing was tested."""
        name = self._any()
        if not await self._run_commands(name, ("CONFIG", "SET", "maxmemory", 1)):
            return False
        num_before = await self._num_errors(name)
        try:
            await asyncio.sleep(self._random.uniform(*FULL_S))
            return await self._num_errors(name) > num_before
        finally:
            await self._empty(name)

    async def _empty(self, name: str) -> None:
        for pause_s in itertools.repeat(AWAY_S[0]):
            if await self._run_commands(name, ("CONFIG", "SET", "maxmemory", 0)):
                return
            await asyncio.sleep(pause_s)

    async def _lose_data(self) -> bool:
        """Delete all data. Return whether there was any."""
        replies = await self._run_commands(self._any(), ("DBSIZE",), ("FLUSHALL",))
        return bool(replies) and replies[0] > 0

    async def _num_errors(self, name: str) -> int:
        """Replies of the server that were errors, since it was started; 0 if there is none."""
        replies = await self._run_commands(name, ("INFO", "stats"))
        return int(replies[0]["total_error_replies"]) if replies else 0

    async def _move(self) -> bool:
        """Move a model, or continue a move. Half of the moves are interrupted, as by the death of the moving process.

        An operator would repeat the command soon, since clients wait at most a minute for a model that is being moved.
        """
        targets = self._random.sample([*self._stack.server_urls], 2)
        if self._random.random() < 0.5:
            patience_s, pause_s = self._random.uniform(*MOVE_S), self._random.uniform(*AWAY_S)
            with suppress(TimeoutError, PenstockError, RedisError):
                async with asyncio.timeout(patience_s):
                    await self._move_to(targets)
            await asyncio.sleep(pause_s)
        with suppress(PenstockError, RedisError):
            await self._move_to(targets)
        await self._end_moves()
        return True

    async def _end_moves(self) -> None:
        """Run a move that was cut short again, and again while servers are in trouble.

        Raises:
            PenstockError, RedisError: it cannot be ended.
        """
        last_try = time.monotonic() + MOVE_PATIENCE_S
        while True:
            try:
                async with self._mover() as mover:
                    for model, target in (await mover.under_way()).items():
                        await mover.move(model, target)
                return
            except (PenstockError, RedisError):
                if time.monotonic() > last_try:
                    raise
            await asyncio.sleep(AWAY_S[0])

    async def _move_to(self, targets: list[str]) -> None:
        """End the move that is under way, or move a model to the first of two servers that it is not at."""
        async with self._mover() as mover:
            under_way = await mover.under_way()
            places = await recorded_places(mover.servers[HOME], Keys())
            model = self._random.choice(sorted(under_way) or sorted(places))
            target = under_way.get(model) or next(name for name in targets if name != places[model])
            await mover.move(model, target)

    @asynccontextmanager
    async def _mover(self) -> AsyncIterator[ShardMover]:
        servers = make_servers(self._stack.url, self._stack.shards)
        try:
            yield ShardMover(servers, Keys())
        finally:
            for server in servers.values():
                await server.close()

    def _any(self) -> str:
        """Return a random server."""
        names = [*self._stack.server_urls]
        return self._random.choice(names) if len(names) > 1 else names[0]

    async def _run_commands(self, name: str, *commands: tuple[str | int, ...]) -> list[Any]:
        """Run commands on the server that is there now, and return its replies; none if it is away."""
        client = redis.asyncio.Redis(connection_pool=parse_pool(self._stack.server_urls[name]))
        try:
            replies = [await client.execute_command(*command) for command in commands]
        except (RedisError, OSError) as error:
            log.info("redis_not_disturbed", error=str(error))
            return []
        finally:
            with suppress(RedisError, OSError):
                await client.aclose(close_connection_pool=True)
        return replies


def _fail_over(trio: SentinelTrio) -> None:
    old_port = trio.kill_primary()
    trio.await_failover(old_port)
    trio.revive(old_port)
    trio.wait_until_complete()
