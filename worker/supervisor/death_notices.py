"""Heartbeats for engines that are dead, so that whoever lists them learns the cause and when they come back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import structlog
from redis.exceptions import RedisError

from ...shared.connection import CommandConnection
from ...shared.errors import PenstockError
from ...shared.keys import Keys
from ..config.worker_config import WorkerConfig
from .supervised_engine import Engine

REMOVE_TIMEOUT_S = 1.0

log = structlog.get_logger()


class DeathNotices:
    """Writes, under the key and the time to live of its heartbeat, what each dead engine cannot say itself.

    Attributes:
        changed: to be set when an engine's phase has changed; its notice is then written at once.
    """

    def __init__(self, connection: CommandConnection, config: WorkerConfig, engines: Sequence[Engine]) -> None:
        self._connection = connection
        self._keys = Keys(config.namespace)
        self._interval_s = config.heartbeat_interval_s
        self._ttl_ms = int(config.heartbeat_ttl_s * 1000)
        self._engines = engines
        self.changed = asyncio.Event()

    async def run(self) -> None:
        """Write until cancelled. A Redis that is away is waited for by the connection."""
        while True:
            self.changed.clear()
            try:
                for engine in self._engines:
                    await self._write(engine)
            except (PenstockError, RedisError) as error:
                log.debug("death_notice_not_written", error=str(error))
            try:
                async with asyncio.timeout(self._interval_s):
                    await self.changed.wait()
            except TimeoutError:
                continue

    async def remove(self) -> None:
        """Take all engines of this supervisor off the list: none is left, in whichever way it went."""
        try:
            async with asyncio.timeout(REMOVE_TIMEOUT_S):
                for engine in self._engines:
                    await self._connection.execute("DEL", self._keys.engine(engine.engine_id))
                    await self._connection.execute("SREM", self._keys.engines(), engine.engine_id)
        except (TimeoutError, PenstockError, RedisError) as error:
            log.debug("heartbeats_not_removed", error=str(error))

    async def _write(self, engine: Engine) -> None:
        notice = engine.notice()
        if notice is None:
            return
        beat = msgspec.json.encode(notice)
        await self._connection.execute("SET", self._keys.engine(engine.engine_id), beat, "PX", self._ttl_ms)
        await self._connection.execute("SADD", self._keys.engines(), engine.engine_id)
