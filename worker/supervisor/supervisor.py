"""Supervisor of one host: starts its engines, reports when they serve, restarts dead ones, and stops all.

    start all ──all READY──▶ serve ──signal, command, or all given up──▶ leave: drain ▶ hand back ▶ kill
         └────one failed───────────────────────────────────────────────────────────▲

Each engine runs in its own task meanwhile (``supervised_engine.py``; phases are those of ``restart.py``):

    spawn ─READY─▶ serve ─death─▶ kill the remains ▶ reclaim its requests ▶ wait ▶ spawn again
                     ▲                                                │              │
                     └──────────────────────READY─────────────────────│──────────────┘
                                               8 deaths in a row without a token ▶ given up

A death is the end of the worker process for any reason, or its silence. Each step of stopping begins when the previous
one took too long, or when a signal or command asks for it. No process is left when ``run`` returns.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import structlog

from ...shared.deployment.orders import ENGINES_OPTION, GROUP_OPTION, MAX_ENGINES_OPTION, WORKER_OPTION, group_refusal
from ...shared.deployment.presence import Presence, ProcessKind
from ...shared.deployment.records import EngineHeartbeat
from ...shared.errors import ConfigurationError, EngineDeadError, PenstockError
from ...shared.keys import Keys
from ...shared.messages.supervision import DrainCommand, ModelCommand, ScaleCommand, WorkerCommand
from ...shared.process import service_manager
from ...shared.process.waiting import wait_at_most
from ...shared.shards import check_servers, make_connections
from ..config.worker_config import WorkerConfig
from .engine_process import EngineProcess, SilenceWatch
from .reaper import Reaper
from .restart import Phase
from .scaling import HAND_BACK_TIMEOUT_S, Scaling
from .stat_loggers import StatLoggerManager
from .supervised_engine import DeathNotices, Engine

if TYPE_CHECKING:
    # Needs prometheus_client, which a worker without metrics does not import.
    from .host_metrics import MetricsServer

# Time for the last round trips of a worker process, which ends its drain by itself.
DRAIN_MARGIN_S = 2.0
# How often a start that takes long names the engines that it waits for.
START_NOTICE_INTERVAL_S = 10.0

log = structlog.get_logger()


class EngineStartError(PenstockError):
    """Failure to start an engine. ``trace`` is its traceback if no sentence explains the cause."""

    code = "engine_start_failed"

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class StopMode(enum.IntEnum):
    """Ways to stop the engines, from the gentlest to the fastest."""

    STAY = 0
    DRAIN = 1
    HAND_BACK = 2
    KILL = 3


class Supervisor:
    """Runs one worker process per configuration, all with the same ``worker_id``.

    Args:
        configs: configuration of each engine; at least one.
        on_ready: called once, when all engines serve.
        metrics: server of metrics and probes.
        stat_loggers: loggers that receive the statistics of the engines.
        make_config: returns the configuration of an engine that is started later, by slot; None allows none.
        max_engines: limit of the number of engines; at least the number of ``configs``.
    """

    def __init__(
        self,
        configs: Sequence[WorkerConfig],
        on_ready: Callable[[], None],
        metrics: MetricsServer | None = None,
        stat_loggers: StatLoggerManager | None = None,
        make_config: Callable[[int], WorkerConfig] | None = None,
        max_engines: int = 0,
    ) -> None:
        if not configs:
            raise ConfigurationError("a supervisor needs at least one engine")
        self._config = configs[0]
        self._on_ready = on_ready
        self._stop_mode = StopMode.STAY
        self._has_failed_to_start = False
        self._drain_patience_s = self._config.drain_timeout_s + DRAIN_MARGIN_S
        self._changed = asyncio.Event()
        keys = self._keys = Keys(self._config.namespace)
        self._redis, self._subscriber = make_connections(
            self._config.redis_url, self._config.shards, keys, retry_for_s=math.inf
        )
        self._reaper = Reaper(self._redis, self._config)
        self._engines = [self._make_engine(config) for config in configs]
        self._max_engines = max(len(configs), max_engines if make_config is not None else 0)
        group = self._config.engine.data_parallel_group
        self._presence = Presence(
            self._redis,
            keys,
            ProcessKind.SUPERVISOR,
            {
                WORKER_OPTION: self._config.worker_id,
                ENGINES_OPTION: str(len(configs)),
                MAX_ENGINES_OPTION: str(self._max_engines),
                **({GROUP_OPTION: group} if group else {}),
            },
        )
        self._notices = DeathNotices(self._redis, self._config, self._engines)
        self._metrics = metrics
        self._stat_loggers = stat_loggers
        self._silence = SilenceWatch(self._config, self._processes_expected_to_report)
        self._running: list[asyncio.Task[None]] = []
        config_of_slot = make_config or configs.__getitem__
        self._scaling = Scaling(
            self._engines,
            self._running,
            lambda slot: self._make_engine(config_of_slot(slot)),
            self._max_engines,
            self._drain_patience_s,
            self._on_change,
            self.scale_refusal,
        )

    @property
    def scale_refusal(self) -> str:
        """Why the number of engines cannot change; empty if it can."""
        group = self._config.engine.data_parallel_group
        return group_refusal(self._config.worker_id, group) if group else ""

    async def run(self) -> bool:
        """Serve until stopped by a signal or a command, and return when all engine processes have ended.

        Returns False if some had to be killed, so that their requests were reclaimed, not released by the engines.

        Raises:
            RedisUnavailableError, RedisUnsupportedError, ConfigurationError: Redis cannot be used; nothing was started.
            EngineStartError: an engine failed to start; the others were stopped.
            EngineDeadError: no engine is left.
        """
        config = self._config
        if self._metrics is not None:
            self._metrics.start(config, self._engines, self._redis, lambda: self._stop_mode > StopMode.STAY)
        await check_servers(config.redis_url, config.shards, namespace=config.namespace, for_worker=True)
        self._install_signals()
        subscriber = self._subscriber
        watching: list[asyncio.Task[None]] = []
        try:
            await subscriber.open()
            if not await self._subscribe_to_commands():
                return True
            await self._redis.open()
            self._presence.start()
            self._running.extend(asyncio.create_task(engine.run()) for engine in self._engines)
            watchers = (self._reaper, self._notices, self._silence)
            watching = [asyncio.create_task(watcher.run()) for watcher in watchers]
            if self._stat_loggers is not None:
                watching.append(asyncio.create_task(self._stat_loggers.run(self._heartbeats)))
            async with service_manager.watched():
                try:
                    await self._start()
                    await self._serve()
                finally:
                    service_manager.tell_stopping()
                    await self._stop_engines()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            if self._running:
                await self._notices.remove()
            await self._presence.leave()
            await subscriber.close()
            await self._redis.close()
        # Raises unexpected errors of the engines' tasks.
        await asyncio.gather(*self._running)
        return self._stop_mode < StopMode.KILL

    def _heartbeats(self) -> list[EngineHeartbeat | None]:
        return [engine.heartbeat_unless_left() for engine in self._engines]

    async def _subscribe_to_commands(self) -> bool:
        """Subscribe to the commands of this worker. Returns False if it is stopped before Redis has confirmed."""
        channel = Keys(self._config.namespace).worker_commands(self._config.worker_id)
        confirmed = (await self._subscriber.begin(channel, self._on_command)).confirmed
        confirmed.add_done_callback(lambda _: self._changed.set())
        await self._until(lambda: confirmed.done() or self._stop_mode > StopMode.STAY)
        return self._stop_mode == StopMode.STAY

    async def _start(self) -> None:
        notices = asyncio.create_task(self._log_awaited_engines())
        try:
            await self._until(
                lambda: (
                    self._is_stopping
                    or any(engine.has_failed_to_start for engine in self._engines)
                    or all(engine.policy.phase is Phase.SERVING for engine in self._engines)
                )
            )
        finally:
            notices.cancel()
        if self._is_stopping:
            return
        for engine in self._engines:
            if engine.has_failed_to_start:
                self._escalate_stop(StopMode.HAND_BACK)
                self._has_failed_to_start = True
                death = engine.death or engine.process.death()
                raise EngineStartError(death.reason, death.trace)
        for engine in self._engines:
            engine.is_restarted = True
        self._on_ready()

    async def _log_awaited_engines(self) -> None:
        clock = asyncio.get_running_loop().time
        started_at = clock()
        while True:
            await asyncio.sleep(START_NOTICE_INTERVAL_S)
            awaited = [engine for engine in self._engines if engine.policy.phase is not Phase.SERVING]
            log.info(
                "start_waits_for_engines",
                engines={engine.engine_id: engine.process.describe_last_report(clock()) for engine in awaited},
                waited_s=round(clock() - started_at),
            )

    async def _serve(self) -> None:
        await self._until(lambda: self._is_stopping or not self._any_running())
        if not self._is_stopping:
            causes = dict.fromkeys(engine.describe_death() for engine in self._engines)
            raise EngineDeadError(f"no engine is left: {'; '.join(causes)}")

    async def _stop_engines(self) -> None:
        """Stop the engines step by step, beginning with the step of ``_stop_mode``."""
        self._scaling.stop()
        steps: list[tuple[StopMode, Callable[[EngineProcess], None], float | None]] = [
            (StopMode.DRAIN, EngineProcess.drain, self._drain_patience_s),
            (StopMode.HAND_BACK, EngineProcess.hand_back, HAND_BACK_TIMEOUT_S),
            (StopMode.KILL, EngineProcess.kill, None),
        ]
        for urgency, act, patience_s in steps:
            if self._stop_mode > urgency:
                continue
            self._stop_mode = urgency
            leaving = [engine for engine, task in zip(self._engines, self._running, strict=False) if not task.done()]
            if leaving:
                # After a failed start, only the reason of the failure matters to the reader of the log.
                log.log(
                    logging.DEBUG if self._has_failed_to_start else logging.INFO,
                    "leaving",
                    step=urgency.name.lower(),
                    engines=[engine.engine_id for engine in leaving],
                )
            for engine in leaving:
                engine.leave(act)
            await wait_at_most(
                patience_s, self._until(lambda step=urgency: self._stop_mode > step or not self._any_running())
            )
            if not self._any_running():
                return

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition``, on the states of the engines and the stop mode, holds."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    @property
    def _is_stopping(self) -> bool:
        return self._stop_mode > StopMode.STAY or self._is_broken()

    def _any_running(self) -> bool:
        return not all(task.done() for task in self._running)

    def _is_broken(self) -> bool:
        """Whether a task of an engine ended by a defect of this program. ``run`` raises it after all have stopped."""
        return any(task.done() and task.exception() for task in self._running)

    def _processes_expected_to_report(self) -> list[EngineProcess]:
        serving = [engine.process for engine in self._engines if engine.is_expected_to_report]
        return serving + [
            engine.standby.waiting_process for engine in self._engines if engine.standby.waiting_process is not None
        ]

    def _on_change(self) -> None:
        self._changed.set()
        self._notices.changed.set()

    def _on_command(self, data: bytes) -> None:
        try:
            command = msgspec.msgpack.decode(data, type=WorkerCommand)
        except msgspec.DecodeError as error:
            log.warning("command_undecodable", error=str(error))
            return
        if isinstance(command, DrainCommand):
            if command.timeout_s is not None:
                self._drain_patience_s = min(command.timeout_s, self._drain_patience_s)
            self._escalate_stop(StopMode.DRAIN)
        elif isinstance(command, ScaleCommand):
            self._scale(command.num_engines)
        elif isinstance(command, ModelCommand):
            self._on_model_command(command)
        else:
            self._escalate_stop(StopMode.HAND_BACK)

    def _scale(self, num_engines: int) -> None:
        self._scaling.scale(num_engines)
        self._presence.record.options[ENGINES_OPTION] = str(self._scaling.num_staying)
        self._presence.say_now()

    def _on_model_command(self, command: ModelCommand) -> None:
        log.warning("model_command_refused", model=command.model, reason="this worker has one model, always awake")

    def _make_engine(self, config: WorkerConfig) -> Engine:
        return Engine(config, self._reaper, self._on_change)

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        """Drain at the first signal, release the requests at the second, kill at the third."""
        self._escalate_stop(StopMode(min(self._stop_mode + 1, StopMode.KILL)))

    def _escalate_stop(self, urgency: StopMode) -> None:
        self._stop_mode = max(self._stop_mode, urgency)
        self._changed.set()
