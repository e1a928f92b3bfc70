"""Supervise one engine: start its worker process, watch it, reclaim its requests and restart it.

While an engine is dead, the supervisor writes its heartbeat: lists show the cause of death and the time of the restart.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog
from redis.exceptions import RedisError

from ...shared.connection import CommandConnection
from ...shared.deployment.records import EngineHeartbeat
from ...shared.errors import PenstockError
from ...shared.keys import Keys
from ...shared.messages.supervision import EngineState
from ...shared.process.waiting import wait_at_most
from ..config.worker_config import WorkerConfig
from .engine_process import EngineProcess
from .reaper import Reaper
from .restart import Death, Phase, RestartPolicy
from .standby import make_standby

# While stopping: requests not reclaimed in this time are left to reapers on other hosts, once the lease expires.
LAST_RECLAIM_TIMEOUT_S = 2.0

log = structlog.get_logger()
REMOVE_TIMEOUT_S = 1.0


class Engine:
    """An engine of this host. Its ``engine_id`` stays the same across restarts.

    Args:
        config: configuration of the worker process.
        reaper: reclaims the requests of the engine when it dies.
        on_change: called after a change of phase or process.

    Attributes:
        policy: restart policy, which holds the phase.
        process: current worker process, or the last one.
        standby: process that continues after a death.
        death: how the last process ended; None while the first one runs.
        is_restarted: whether the engine is restarted when it dies. False until all engines of the host serve. For a
            rank of a group: True once it has served or lost its group, since other ranks may stand by indefinitely.
    """

    def __init__(self, config: WorkerConfig, reaper: Reaper, on_change: Callable[[], None]) -> None:
        self.engine_id = config.engine_id
        self.policy = RestartPolicy()
        self.process = EngineProcess(config, self._on_process_change)
        self.standby = make_standby(config, lambda: self.heartbeat().device_memory_bytes)
        self.death: Death | None = None
        self.is_restarted = False
        self._config = config
        self._reaper = reaper
        self._on_change = on_change
        self._leaving = asyncio.Event()
        self._died_at = 0.0
        self._restart_at = 0.0

    @property
    def config(self) -> WorkerConfig:
        """Configuration of its next process."""
        return self._config

    async def run(self) -> None:
        """Run and restart the worker process until it is stopped, given up, or dies before restarts are enabled."""
        try:
            while True:
                await self._run_process()
                if self._is_rank and self.death is not None and self.death.is_external:
                    self.is_restarted = True
                is_last = self._leaving.is_set() or not self.is_restarted
                if not is_last:
                    self._record_death()
                # Before waiting for its processes, so that other engines resume its requests meanwhile.
                await self._reclaim()
                if self.standby.waiting_process is None:
                    await self.process.gone()
                is_last = is_last or self.policy.phase is Phase.GIVEN_UP
                if not is_last:
                    await wait_at_most(self.policy.restart_in_s, self._leaving.wait())
                # Asked again, because it may be set at the moment when the time is over.
                if is_last or self._leaving.is_set():
                    break
                self.policy.restarting()
            self.policy.leave()
        finally:
            self.standby.end_standby("the engine ends")
            self.process.kill()
            await self.standby.gone()
            self._on_change()

    def leave(self, how: Callable[[EngineProcess], None]) -> None:
        """Stop restarting the engine, and call ``how`` with its worker process if that is alive."""
        self._leaving.set()
        self.standby.end_standby("the engine leaves")
        if self.process.alive:
            how(self.process)

    @property
    def has_failed_to_start(self) -> bool:
        """Whether the process has ended or reported a failure, and restarts are not enabled."""
        return bool(self.death or self.process.failure) and not self.is_restarted

    @property
    def is_expected_to_report(self) -> bool:
        """Whether missing reports of the worker process mean that it hangs.

        Its event loop sends reports while the core loads, however long that takes.
        """
        expected = self.policy.phase in (Phase.STARTING, Phase.SERVING, Phase.RESTARTING)
        return expected and self.process.alive and not self._leaving.is_set()

    def notice(self) -> EngineHeartbeat | None:
        """Return the heartbeat to write for a dead worker; None if the worker sends its own or has left."""
        is_silent = self.policy.phase is Phase.RESTARTING and not self.process.has_reported
        if self.death is None or not (is_silent or self.policy.phase in (Phase.DOWN, Phase.GIVEN_UP)):
            return None
        notice = self._minimal_heartbeat(EngineState.DEAD)
        notice.error, notice.restart_at = self.describe_death(), self._restart_at
        return notice

    def heartbeat(self) -> EngineHeartbeat:
        """Return the current state of the engine by its worker's last report. Works while Redis is away."""
        notice = self.notice()
        if notice is not None:
            return notice
        if not self.process.heartbeat:
            return self._minimal_heartbeat(self.process.state)
        return msgspec.json.decode(self.process.heartbeat, type=EngineHeartbeat)

    @property
    def unreadiness(self) -> str:
        """Why the worker is not ready because of this engine; empty if it is."""
        if self.policy.phase in (Phase.SERVING, Phase.LEFT):
            return ""
        return f"engine {self.engine_id} is {self.policy.phase}"

    def heartbeat_unless_left(self) -> EngineHeartbeat | None:
        """Return ``heartbeat()``; None if this engine has left."""
        return None if self.policy.phase is Phase.LEFT else self.heartbeat()

    @property
    def _is_rank(self) -> bool:
        return self._config.engine.is_grouped

    def _minimal_heartbeat(self, state: EngineState) -> EngineHeartbeat:
        config = self._config
        return EngineHeartbeat(
            worker_id=config.worker_id,
            engine_id=config.engine_id,
            engine_name=config.engine_name,
            model=config.engine.model_name,
            state=state,
            host=socket.gethostname(),
            worker_pid=0,
            core_pid=0,
            supervisor_pid=config.supervisor_pid,
            device=config.device_name,
            num_restarts=self.policy.num_restarts,
        )

    def describe_death(self) -> str:
        """Return the cause of the last death, and whether the engine was given up."""
        reason = self.death.reason if self.death is not None else "it has not died"
        if self.policy.phase is Phase.GIVEN_UP:
            return f"given up after {self.policy.num_barren_deaths} deaths in a row without a token: {reason}"
        return reason

    async def _run_process(self) -> None:
        """Run one worker process to its end, with the weights of the previous process, and asleep if that slept."""
        self._config = self._with_weights(self.process)
        config = msgspec.structs.replace(
            self._config, num_restarts=self.policy.num_restarts, starts_asleep=self.process.sleep_level
        )
        try:
            await self._begin_process(config)
        except OSError as error:
            # The host is out of processes or memory, which may pass.
            self.death = Death(f"the worker process could not be started: {error}", is_external=True)
        else:
            if self._leaving.is_set():
                self.process.drain()  # the request to stop came before this process existed
            await self.process.ended.wait()
            self.death = self.process.death()
        self._died_at = asyncio.get_running_loop().time()

    def _with_weights(self, process: EngineProcess) -> WorkerConfig:
        """Return the configuration of a process that loads the weights which ``process`` serves."""
        folder, version = process.weights
        if not folder:
            return self._config
        name = self._config.engine.model_name
        engine = msgspec.structs.replace(self._config.engine, model=folder, served_model_name=name)
        return msgspec.structs.replace(self._config, engine=engine, weights_version=version)

    async def _begin_process(self, config: WorkerConfig) -> None:
        """Let the process on standby serve, or start a new one.

        Raises:
            OSError: the host cannot start another process.
        """
        process = self.standby.take_process(config)
        if process is not None:
            self.process, process.on_change = process, self._on_process_change
            process.activate(config.num_restarts)
            return
        self.process = EngineProcess(await self.standby.prepare_start(config), self._on_process_change)
        await self.process.start()

    def _record_death(self) -> None:
        assert self.death is not None
        self.policy.died(self.death)
        delay_s = self.policy.restart_in_s
        self._restart_at = time.time() + delay_s
        fields: dict[str, Any] = {
            "engine_id": self.engine_id,
            "cause": self.death.reason,
            "is_external": self.death.is_external,
            "num_restarts": self.policy.num_restarts,
        }
        if self.death.trace:
            fields["trace"] = self.death.trace
        if self.policy.phase is Phase.GIVEN_UP:
            self._restart_at = 0.0
            log.error("engine_given_up", **fields, num_deaths=self.policy.num_barren_deaths)
        else:
            log.error("engine_lost", **fields, restart_in_s=round(delay_s, 1))
        self._on_change()

    async def _reclaim(self) -> None:
        """Reclaim the requests and the lease of the engine; for ``LAST_RECLAIM_TIMEOUT_S`` at most while it stops.

        Runs after every process, even one that left in order and holds nothing, because only the broker knows that.
        """
        assert self.death is not None
        hands_back = self._leaving.is_set() and self.process.was_killed_by_supervisor
        reclaiming = asyncio.create_task(self._reaper.reclaim(self.engine_id, self.death, hands_back=hands_back))
        leaving = asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait([reclaiming, leaving], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([reclaiming], timeout=LAST_RECLAIM_TIMEOUT_S)
        finally:
            leaving.cancel()
            if not reclaiming.done():
                log.warning("requests_not_reclaimed", engine_id=self.engine_id)
            reclaiming.cancel()

    def _on_process_change(self, process: EngineProcess) -> None:
        serves = process.state in (EngineState.READY, EngineState.BUSY, EngineState.SLEEPING)
        if serves and self.policy.phase in (Phase.STARTING, Phase.RESTARTING):
            self.policy.ready()
            self.is_restarted = self.is_restarted or self._is_rank
            if self.death is not None:
                log.info(
                    "engine_restarted",
                    engine_id=self.engine_id,
                    num_restarts=self.policy.num_restarts,
                    took_s=round(asyncio.get_running_loop().time() - self._died_at, 2),
                )
        if process.sleep_level > self.standby.deepest_sleep:
            self.standby.end_standby("the engine sleeps")
        elif serves and not self._leaving.is_set():
            self.standby.keep_ready(self._with_weights(process))
        self._on_change()


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
                    await self._write_notice(engine)
            except (PenstockError, RedisError) as error:
                log.debug("death_notice_not_written", error=str(error))
            await wait_at_most(self._interval_s, self.changed.wait())

    async def remove(self) -> None:
        """Remove all engines of this supervisor from the list, once none is left."""
        try:
            async with asyncio.timeout(REMOVE_TIMEOUT_S):
                for engine in self._engines:
                    await self._connection.execute("DEL", self._keys.engine(engine.engine_id))
                    await self._connection.execute("SREM", self._keys.engines(), engine.engine_id)
        except (TimeoutError, PenstockError, RedisError) as error:
            log.debug("heartbeats_not_removed", error=str(error))

    async def _write_notice(self, engine: Engine) -> None:
        notice = engine.notice()
        if notice is None:
            return
        heartbeat = msgspec.json.encode(notice)
        await self._connection.execute("SET", self._keys.engine(engine.engine_id), heartbeat, "PX", self._ttl_ms)
        await self._connection.execute("SADD", self._keys.engines(), engine.engine_id)
