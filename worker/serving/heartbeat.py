"""Tell Redis, every second and under a time to live, what this engine is and does."""

from __future__ import annotations

import asyncio
import os
import socket
import time

import msgspec
import psutil
import structlog

from ...shared.connection import CommandConnection
from ...shared.errors import RedisUnavailableError
from ...shared.keys import Keys
from ...shared.messages import EngineHeartbeat, EngineState, SchedulerStats
from ..config import WorkerConfig

log = structlog.get_logger()


class Heartbeat:
    """Holds the engine's last known state; ``run`` writes it until cancelled."""

    def __init__(self, config: WorkerConfig, connection: CommandConnection) -> None:
        self._config = config
        self._connection = connection
        self._keys = Keys(config.namespace)
        self.state = EngineState.STARTING
        self.error = ""
        self.core_pid = 0
        self.stats = SchedulerStats()
        self.num_tokens = 0
        self._started_at = time.time()
        self._last = (time.monotonic(), 0)

    async def run(self) -> None:
        """Beat for ever. A Redis that is away is waited for: the beat says nothing while it cannot be heard."""
        while True:
            try:
                await self.beat()
            except RedisUnavailableError as error:
                log.warning("heartbeat not written", error=str(error))
            await asyncio.sleep(self._config.heartbeat_interval_s)

    async def beat(self) -> None:
        """Write the heartbeat once."""
        engine_id = self._config.engine_id
        ttl_ms = int(self._config.heartbeat_ttl_s * 1000)
        beat = msgspec.json.encode(self._snapshot())
        await asyncio.gather(
            self._connection.execute("SET", self._keys.engine(engine_id), beat, "PX", ttl_ms),
            self._connection.execute("SADD", self._keys.engines(), engine_id),
        )

    async def leave(self) -> None:
        """Take this engine off the list."""
        engine_id = self._config.engine_id
        await asyncio.gather(
            self._connection.execute("DEL", self._keys.engine(engine_id)),
            self._connection.execute("SREM", self._keys.engines(), engine_id),
        )

    def _snapshot(self) -> EngineHeartbeat:
        config, stats = self._config, self.stats
        busy = stats.num_running_reqs + stats.num_waiting_reqs > 0
        state = EngineState.BUSY if self.state == EngineState.READY and busy else self.state
        return EngineHeartbeat(
            worker_id=config.worker_id,
            engine_id=config.engine_id,
            model=config.engine.model_name,
            state=state,
            host=socket.gethostname(),
            worker_pid=os.getpid(),
            core_pid=self.core_pid,
            supervisor_pid=config.supervisor_pid,
            device=config.engine.device if config.visible_devices is None else f"cuda:{config.visible_devices}",
            started_at=self._started_at,
            num_running_reqs=stats.num_running_reqs,
            num_waiting_reqs=stats.num_waiting_reqs,
            kv_cache_usage=stats.kv_cache_usage,
            step_counter=stats.step_counter,
            tokens_per_s=self._rate(),
            worker_rss_bytes=_rss_bytes(os.getpid()),
            core_rss_bytes=_rss_bytes(self.core_pid),
            error=self.error,
        )

    def _rate(self) -> float:
        (then, before), now = self._last, time.monotonic()
        self._last = (now, self.num_tokens)
        return (self.num_tokens - before) / max(now - then, 1e-3)


def _rss_bytes(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss if pid else 0
    except psutil.Error:
        return 0
