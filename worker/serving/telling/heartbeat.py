"""Tell Redis, every second and under a time to live, what this engine is and does, and what model it serves."""

from __future__ import annotations

import asyncio
import os
import socket
import time

import msgspec
import psutil
import structlog

from ....shared.connection import CommandConnection
from ....shared.deployment.records import EngineHeartbeat, ModelCard
from ....shared.errors import RedisUnavailableError
from ....shared.keys import Keys
from ....shared.messages.from_core import SchedulerStats
from ....shared.messages.waves import GroupStanding
from ....shared.messages.worker_status import EngineState
from ....shared.stats.engine import EngineStats
from ...config.worker_config import WorkerConfig
from ...progress import Phase, Progress, ProgressReader
from ..core.stall import StallWatch

ENTERED_AGAIN_EVERY = 10

log = structlog.get_logger()


class Heartbeat:
    """Holds the engine's last known state; ``run`` writes it until cancelled.

    Attributes:
        told: the last ``EngineHeartbeat`` that was made, as JSON; empty before the first.
        weights_version: of what is served; empty before the engine is ready.
        weights_folder: where it came from, if it was put in the place of what was loaded first.
    """

    def __init__(self, config: WorkerConfig, connection: CommandConnection) -> None:
        self._config = config
        self._connection = connection
        self._keys = Keys(config.namespace)
        self.state = EngineState.STARTING
        self.error = ""
        self.core_pid = 0
        self.stats = SchedulerStats()
        self.engine_stats: EngineStats | None = None
        self.num_tokens = 0
        self.lora_digests: list[str] = []
        self.weights_version = ""
        self.weights_folder = ""
        self._group: GroupStanding | None = None
        self._started_at = time.time()
        self._num_beats = 0
        self._card: ModelCard | None = None
        self._last = (time.monotonic(), 0)
        self._tokens_per_s = 0.0
        self._looked_at = 0.0
        self.told = b""
        self._progress: ProgressReader | None = None
        self._stall_watch: StallWatch | None = None

    def watch(self, progress: ProgressReader, stall_watch: StallWatch) -> None:
        """Tell what these know of the core, too; without them the core is seen to do nothing."""
        self._progress, self._stall_watch = progress, stall_watch

    def tell_group(self, group: GroupStanding) -> None:
        """Tell where it stands in its data-parallel group, too."""
        self._group = group

    async def register(self, card: ModelCard) -> None:
        """Let clients know of the model that is served from now on."""
        await self._connection.execute("HSET", self._keys.models(), card.model, msgspec.json.encode(card))
        self._card = card

    async def tell_version(self, version: str) -> None:
        """Let the card and the next beat say what is served from now on."""
        self.weights_version = version
        if self._card is not None:
            await self.register(msgspec.structs.replace(self._card, weights_version=version, registered_at=time.time()))

    async def run(self) -> None:
        """Beat for ever. A Redis that is away is waited for: the beat says nothing while it cannot be heard."""
        while True:
            try:
                await self.beat()
            except RedisUnavailableError as error:
                log.warning("heartbeat_not_written", error=str(error))
            await asyncio.sleep(self._config.heartbeat_interval_s)

    async def beat(self) -> None:
        """Write the heartbeat once."""
        engine_id = self._config.engine_id
        ttl_ms = int(self._config.heartbeat_ttl_s * 1000)
        await self._look()
        former = await self._connection.execute("SET", self._keys.engine(engine_id), self.told, "PX", ttl_ms, "GET")
        if former is None or self._num_beats % ENTERED_AGAIN_EVERY == 0:
            await self._enter()
        self._num_beats += 1

    async def look_again(self, age_s: float) -> None:
        """Make ``told`` anew if it is older than that: a beat that waits for Redis keeps nobody else from knowing."""
        if time.monotonic() - self._looked_at >= age_s:
            await self._look()

    async def _look(self) -> None:
        own, *others = await asyncio.to_thread(_rss_bytes, os.getpid(), self.core_pid, *self._other_ranks)
        self.told = msgspec.json.encode(self._snapshot(own, sum(others)))
        self._looked_at = time.monotonic()

    @property
    def _other_ranks(self) -> list[int]:
        """Process ids of the ranks beside the core."""
        setup = self._card.setup if self._card is not None else None
        return [] if setup is None or setup.ranks is None else setup.ranks.pids[1:]

    async def _enter(self) -> None:
        """Write what stays in Redis without a time to live, where it is missing.

        Whoever lists engines drops those that do not beat; seldom, one drops this one just as it begins again. And
        Redis may have lost all that it had: then nobody would know of this engine, its model, or requests to reap.
        """
        entering = [self._connection.execute("SADD", self._keys.engines(), self._config.engine_id)]
        if self._card is not None:
            # A newer card than ours, of an engine that began later, stays.
            card = msgspec.json.encode(self._card)
            entering.append(self._connection.execute("HSETNX", self._keys.models(), self._card.model, card))
        await asyncio.gather(*entering)

    async def leave(self) -> None:
        """Take this engine off the list."""
        engine_id = self._config.engine_id
        await asyncio.gather(
            self._connection.execute("DEL", self._keys.engine(engine_id)),
            self._connection.execute("SREM", self._keys.engines(), engine_id),
        )

    def _snapshot(self, worker_rss_bytes: int, core_rss_bytes: int) -> EngineHeartbeat:
        config, stats = self._config, self.stats
        progress = self._progress.read() if self._progress is not None else Progress()
        return EngineHeartbeat(
            worker_id=config.worker_id,
            engine_id=config.engine_id,
            engine_name=config.engine_name,
            model=config.engine.model_name,
            state=self._state(progress),
            host=socket.gethostname(),
            worker_pid=os.getpid(),
            core_pid=self.core_pid,
            supervisor_pid=config.supervisor_pid,
            device=config.device_name,
            started_at=self._started_at,
            num_running_reqs=stats.num_running_reqs,
            num_waiting_reqs=stats.num_waiting_reqs,
            kv_cache_usage=stats.kv_cache_usage,
            step_counter=progress.step_counter,
            tokens_per_s=self._rate(),
            worker_rss_bytes=worker_rss_bytes,
            core_rss_bytes=core_rss_bytes,
            error=self.error,
            num_restarts=config.num_restarts,
            device_memory_bytes=stats.device_memory_bytes,
            stats=self.engine_stats,
            setup=self._card.setup if self._card is not None else None,
            lora_digests=self.lora_digests,
            weights_version=self.weights_version,
            group=self._group,
        )

    def _state(self, progress: Progress) -> EngineState:
        """What was set, told more finely by what the core is seen to do."""
        if self.state not in (EngineState.STARTING, EngineState.READY):
            return self.state
        if progress.phase is Phase.COMPILING:
            return EngineState.COMPILING
        if self.state is EngineState.STARTING:
            return self.state
        if self._stall_watch is not None and self._stall_watch.is_stalling:
            return EngineState.STALLED
        return EngineState.BUSY if progress.num_unfinished_reqs else EngineState.READY

    def _rate(self) -> float:
        (then, before), now = self._last, time.monotonic()
        # What a moment shorter than this has brought says nothing of a rate.
        if now - then >= self._config.heartbeat_interval_s / 2:
            self._tokens_per_s = (self.num_tokens - before) / max(now - then, 1e-3)
            self._last = (now, self.num_tokens)
        return self._tokens_per_s


def _rss_bytes(*pids: int) -> list[int]:
    """Resident memory of each process; 0 for one that is not there."""
    sizes: list[int] = []
    for pid in pids:
        try:
            sizes.append(psutil.Process(pid).memory_info().rss if pid else 0)
        except psutil.Error:
            sizes.append(0)
    return sizes
