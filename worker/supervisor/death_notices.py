"""Heartbeats of dead engines, written by the supervisor: lists show the cause of death and the time of the restart."""

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
    """Writer of heartbeats for dead engines, under the key and with the time to live of the engine's own heartbeat.

    Attributes:
        changed: set it after an engine's phase has changed, and its notice is written immediately.
    """

    def __init__(self, connection: CommandConnection, config: WorkerConfig, engines: Sequence[Engine]) -> None:
        self._connection = connection
        self._keys = Keys(config.namespace)
        self._interval_s = config.heartbeat_interval_s
        self._ttl_ms = int(config.heartbeat_ttl_s * 1000)
        self._engines = engines
        self.changed = asyncio.Event()

    async def run(self) -> None:
        """Write until cancelled. The connection waits while Redis is away."""
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
        """Remove all engines of this supervisor from the list, once none is left."""
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
        heartbeat = msgspec.json.encode(notice)
        await self._connection.execute("SET", self._keys.engine(engine.engine_id), heartbeat, "PX", self._ttl_ms)
        await self._connection.execute("SADD", self._keys.engines(), engine.engine_id)
