"""Report the state of this engine: the heartbeat in Redis, its loaded adapters, and status lines for the supervisor.

The heartbeat, with a time to live, describes engine and model every second. A status line is written at every change of
state and every second. It includes the heartbeat, so that the supervisor knows its engines while Redis is unreachable.
Claims and heartbeats use the adapters that the core has loaded; pinned ones are loaded at the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import psutil
import structlog
from redis.exceptions import RedisError

from ....shared.broker.engine_calls import LOADED_TTL_MS, report_loaded
from ....shared.connection import CommandConnection
from ....shared.control.model import AddLora, PinLora
from ....shared.deployment.records import DeviceUse, EngineHeartbeat, ModelCard, decode_record
from ....shared.errors import PenstockError
from ....shared.keys import Keys
from ....shared.lora.registry import AdapterRecord, AdapterRegistry
from ....shared.messages.core import EngineCoreOutputs, GroupStatus, SchedulerStats
from ....shared.messages.supervision import EngineState, SleepOrderDone, WorkerStatus
from ....shared.process.waiting import wait_at_most
from ....shared.stats import EngineStats
from ...config.worker_config import STATUS_INTERVAL_S, WorkerConfig
from ...processes.progress import Phase, Progress, ProgressReader
from ..core.client import CoreClient
from ..core.stall import StallWatch
from ..partitions.served_partitions import ServedPartition, ServedPartitions
from .device_use import DeviceReader

REGISTER_EVERY = 10

log = structlog.get_logger()
REPORT_EVERY_S = LOADED_TTL_MS / 3000
# A partition whose Redis is unreachable gets the report in the next round.
PATIENCE_S = 1.0


class Heartbeat:
    """The engine's last known state; ``run`` writes it until cancelled.

    Attributes:
        encoded: the last ``EngineHeartbeat`` as JSON; empty before the first.
        weights_version: version of the served weights; empty before the engine is ready.
        weights_folder: folder of the served weights if they replaced those loaded at the start; otherwise empty.
        sleep_level: level at which the next process sleeps if this one dies; 0 for an engine that is awake.
        drains_until: as in ``EngineHeartbeat``.
        num_wishes, is_held: as in ``WorkerStatus``.
        report: writes a status line; for changes that the next process must know.
    """

    def __init__(self, config: WorkerConfig, connection: CommandConnection) -> None:
        self._config = config
        self._num_restarts = config.num_restarts
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
        self.sleep_level = config.starts_asleep
        self.drains_until = 0.0
        self.num_wishes = 0
        self.is_held = False
        self.report: Callable[[], None] = lambda: None
        self._group: GroupStatus | None = None
        self._started_at = time.time()
        self._num_heartbeats = 0
        self._card: ModelCard | None = None
        self._device = DeviceReader(config.device_name)
        self._device_use: DeviceUse | None = None
        self._last = (time.monotonic(), 0)
        self._tokens_per_s = 0.0
        self._encoded_at = 0.0
        self.encoded = b""
        self._progress: ProgressReader | None = None
        self._stall_watch: StallWatch | None = None

    def watch(self, progress: ProgressReader, stall_watch: StallWatch) -> None:
        """Include the progress of the core in the heartbeat. Without it, the core seems idle."""
        self._progress, self._stall_watch = progress, stall_watch

    def activate(self, num_restarts: int) -> None:
        """Describe the engine from now on, as its process after ``num_restarts``."""
        self._num_restarts, self._started_at = num_restarts, time.time()

    def set_group_status(self, group: GroupStatus) -> None:
        """Include the status in its data-parallel group in the heartbeat."""
        self._group = group

    def set_sleep_level(self, level: int) -> None:
        """Set ``sleep_level``, and report it to the supervisor."""
        if level != self.sleep_level:
            self.sleep_level = level
            self.report()

    async def adopt_card(self) -> None:
        """Take the card that another process has registered for the model, to restore it if Redis loses its data."""
        model = self._config.engine.model_name
        data = await self._connection.execute("HGET", self._keys.models(), model)
        if data is not None:
            self._card = decode_record("model card", model, data, ModelCard)

    async def register(self, card: ModelCard) -> None:
        """Publish the card of the model, which is served from now on."""
        await self._connection.execute("HSET", self._keys.models(), card.model, msgspec.json.encode(card))
        self._card = card

    async def set_model_version(self, version: str) -> None:
        """Publish the version of the served weights in the card and a heartbeat."""
        self.weights_version = version
        await self.try_to_beat()
        if self._card is not None:
            await self.register(msgspec.structs.replace(self._card, weights_version=version, registered_at=time.time()))

    async def run(self) -> None:
        """Write heartbeats until cancelled, except while Redis is unreachable or refuses them."""
        while True:
            await self.try_to_beat()
            await asyncio.sleep(self._config.heartbeat_interval_s)

    async def try_to_beat(self) -> None:
        """Write the heartbeat once, unless Redis is unreachable or refuses it."""
        try:
            await self.beat()
        except (PenstockError, RedisError) as error:
            log.warning("heartbeat_not_written", error=str(error))

    async def beat(self) -> None:
        """Write the heartbeat once."""
        engine_id = self._config.engine_id
        ttl_ms = int(self._config.heartbeat_ttl_s * 1000)
        await self._encode()
        former = await self._connection.execute("SET", self._keys.engine(engine_id), self.encoded, "PX", ttl_ms, "GET")
        if former is None or self._num_heartbeats % REGISTER_EVERY == 0:
            await self._register_engine()
        self._num_heartbeats += 1

    async def refresh(self, age_s: float) -> None:
        """Update ``encoded`` if it is older than ``age_s``, so that other readers need not wait for Redis."""
        if time.monotonic() - self._encoded_at >= age_s:
            await self._encode()

    async def _encode(self) -> None:
        own, *others = await asyncio.to_thread(_rss_bytes, os.getpid(), self.core_pid, *self._other_ranks)
        self._device_use = await asyncio.to_thread(self._device.read)
        self.encoded = msgspec.json.encode(self._snapshot(own, sum(others)))
        self._encoded_at = time.monotonic()

    @property
    def _other_ranks(self) -> list[int]:
        """Process ids of the ranks other than the core."""
        setup = self._card.setup if self._card is not None and self.core_pid else None
        return [] if setup is None or setup.ranks is None else setup.ranks.local_pids[1:]

    async def _register_engine(self) -> None:
        """Write the records without a time to live if they are missing: the list of engines, and the model's card.

        They can be missing for two reasons. A process that lists engines removes those without a heartbeat, and may
        remove this one just as it starts again. Redis may have lost its data; without the records no process would know
        this engine, its model, or the requests to reap.
        """
        writes = [self._connection.execute("SADD", self._keys.engines(), self._config.engine_id)]
        if self._card is not None:
            # HSETNX keeps a newer card of an engine that started later.
            card = msgspec.json.encode(self._card)
            writes.append(self._connection.execute("HSETNX", self._keys.models(), self._card.model, card))
        await asyncio.gather(*writes)

    async def leave(self) -> None:
        """Remove this engine from the list."""
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
            num_restarts=self._num_restarts,
            device_memory_bytes=stats.device_memory_bytes,
            stats=self.engine_stats,
            setup=self._card.setup if self._card is not None else None,
            lora_digests=self.lora_digests,
            weights_version=self.weights_version,
            group=self._group,
            sleep_level=self.sleep_level,
            device_use=self._device_use,
            drains_until=self.drains_until,
        )

    def _state(self, progress: Progress) -> EngineState:
        """Return the state that was set, refined by the progress of the core."""
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
        # A shorter interval gives no meaningful rate.
        if now - then >= self._config.heartbeat_interval_s / 2:
            self._tokens_per_s = (self.num_tokens - before) / max(now - then, 1e-3)
            self._last = (now, self.num_tokens)
        return self._tokens_per_s


def _rss_bytes(*pids: int) -> list[int]:
    """Return the resident memory of each process; 0 for a process that does not exist."""
    sizes: list[int] = []
    for pid in pids:
        try:
            sizes.append(psutil.Process(pid).memory_info().rss if pid else 0)
        except psutil.Error:
            sizes.append(0)
    return sizes


class StatusLines:
    """Writer of status lines to standard output. ``state`` is the last state written."""

    def __init__(self, engine_id: str, heartbeat: Heartbeat) -> None:
        self._engine_id = engine_id
        self._heartbeat = heartbeat
        self.state = EngineState.STARTING
        heartbeat.report = lambda: self.report(self.state)

    async def run(self) -> None:
        """Write the state every ``STATUS_INTERVAL_S``, until it is FAILED or this is cancelled."""
        while self.state != EngineState.FAILED:
            # Skip a full pipe, because a paused supervisor reads nothing, and the write would block this process too.
            if select.select([], [sys.stdout], [], 0)[1]:
                await self._heartbeat.refresh(STATUS_INTERVAL_S)
                self.report(self.state)
            await asyncio.sleep(STATUS_INTERVAL_S)

    def report(
        self,
        state: EngineState,
        *,
        code: str = "",
        message: str = "",
        trace: str = "",
        is_external: bool = False,
        outcome: SleepOrderDone | None = None,
    ) -> None:
        """Set the state, and write a line immediately."""
        self.state = state
        status = WorkerStatus(
            engine_id=self._engine_id,
            state=state,
            code=code,
            message=message,
            trace=trace,
            is_external=is_external,
            num_tokens=self._heartbeat.num_tokens,
            weights_folder=self._heartbeat.weights_folder,
            weights_version=self._heartbeat.weights_version if self._heartbeat.weights_folder else "",
            sleep_level=self._heartbeat.sleep_level,
            done=outcome,
            num_wishes=self._heartbeat.num_wishes,
            is_held=self._heartbeat.is_held,
        )
        # Only into an empty pipe, because the some kilobytes of a heartbeat may not fit into one that is partly full.
        if self._heartbeat.encoded and _all_is_read():
            status.heartbeat = msgspec.Raw(self._heartbeat.encoded)
        with contextlib.suppress(BrokenPipeError):  # the supervisor has exited; the end of standard input shows it too
            # Begins a new line, because a library may have printed text without an end of line.
            sys.stdout.buffer.write(b"\n" + msgspec.json.encode(status) + b"\n")
            sys.stdout.buffer.flush()


def _all_is_read() -> bool:
    """Whether the supervisor has read all lines so far."""
    try:
        unread = fcntl.ioctl(sys.stdout, termios.FIONREAD, struct.pack("i", 0))
    except OSError:
        return False  # standard output is not a pipe, because the process was started by hand
    return struct.unpack("i", unread) == (0,)


class LoadedAdapters:
    """Reporter of loaded adapters. Its collaborators belong to the ``WorkerService``.

    Call ``update`` with the core's outputs, ``run`` until cancelled, then ``leave``.
    """

    def __init__(
        self,
        config: WorkerConfig,
        connection: CommandConnection,
        parts: ServedPartitions,
        core: CoreClient,
        heartbeat: Heartbeat,
    ) -> None:
        self._engine_id = config.engine_id
        self._model = config.engine.model_name
        self._connection = connection
        self._registry = AdapterRegistry(connection, Keys(config.namespace))
        self._parts = parts
        self._core = core
        self._heartbeat = heartbeat
        self._has_changed = asyncio.Event()
        self._has_reported = False

    def update(self, outputs: EngineCoreOutputs) -> None:
        """Record which adapters are loaded, if the outputs contain it."""
        if outputs.lora_digests is not None:
            self._heartbeat.lora_digests = outputs.lora_digests
            self._has_changed.set()

    async def run(self) -> None:
        """Load pinned adapters, and report all loaded ones at each change and every ``REPORT_EVERY_S``."""
        loading = asyncio.create_task(self._load_pinned())
        try:
            while True:
                self._has_changed.clear()
                if self._heartbeat.lora_digests or self._has_reported:
                    await self._report(self._heartbeat.lora_digests)
                await wait_at_most(REPORT_EVERY_S, self._has_changed.wait())
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    async def leave(self) -> None:
        """Report that no adapter is loaded, so that no requests wait for this engine. Otherwise the report expires."""
        if self._has_reported:
            await self._report([])

    async def _report(self, digests: list[str]) -> None:
        self._has_reported = True
        await asyncio.gather(*(self._report_to(part, digests) for part in self._parts))

    async def _report_to(self, part: ServedPartition, digests: list[str]) -> None:
        # Without the report, any engine may claim the requests.
        with suppress(TimeoutError, PenstockError, RedisError):
            async with asyncio.timeout(PATIENCE_S):
                await report_loaded(self._connection, part.broker.keys, self._engine_id, digests)

    async def _load_pinned(self) -> None:
        records = await self._registry.read(self._model)
        for record in {record.digest: record for record in records if record.pinned}.values():
            await self._load(record)

    async def _load(self, record: AdapterRecord) -> None:
        """Load and pin an adapter. A failure is only logged, since requests that use the adapter report it too."""
        try:
            await self._core.call(AddLora(record.request()))
            await self._core.call(PinLora(record.number))
        except PenstockError as error:
            log.warning("pinned_adapter_not_loaded", adapter=record.name, digest=record.digest, error=str(error))
