"""The supervisor of one host: starts its engines, says when they serve, and takes them down.

    start all ──all READY──▶ serve ──signal, command, or none left──▶ leave: drain ▶ hand back ▶ kill
         └────one failed──────────────────────────────────────────────────────────▲

Each step of leaving begins when the one before took too long, or when somebody is in a greater hurry. Whatever
happens, no process is left when ``run`` returns.
"""

from __future__ import annotations

import asyncio
import enum
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import structlog

from ...shared.connection import Subscriber
from ...shared.errors import ConfigurationError, EngineDeadError, PenstockError
from ...shared.keys import Keys
from ...shared.messages import DrainCommand, EngineState, WorkerCommand
from ...shared.redis_check import check_redis
from ..config import WorkerConfig
from .engine_process import EngineProcess

# The worker process ends a drain by itself; this is for its last round trips.
DRAIN_MARGIN_S = 2.0
HAND_BACK_TIMEOUT_S = 10.0

log = structlog.get_logger()


class EngineStartError(PenstockError):
    """An engine could not start; ``trace`` is its traceback if a sentence does not explain the cause."""

    code = "engine_start_failed"

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class Urgency(enum.IntEnum):
    """How the engines are to leave."""

    STAY = 0
    DRAIN = 1
    HAND_BACK = 2
    KILL = 3


class Supervisor:
    """One worker process per configuration, all with the same ``worker_id``.

    Args:
        configs: one per engine; at least one.
        on_ready: called once, when all engines serve.
    """

    def __init__(self, configs: Sequence[WorkerConfig], on_ready: Callable[[], None]) -> None:
        if not configs:
            raise ConfigurationError("a supervisor needs at least one engine")
        self._config = configs[0]
        self._engines = [EngineProcess(config, self._on_change) for config in configs]
        self._on_ready = on_ready
        self._urgency = Urgency.STAY
        self._drain_patience_s = self._config.drain_timeout_s + DRAIN_MARGIN_S
        self._changed = asyncio.Event()
        self._serving = False

    async def run(self) -> bool:
        """Serve until told to leave, and return when all engine processes are gone.

        Returns False if some had to be killed, so that their requests were not handed back.

        Raises:
            RedisUnavailableError, RedisUnsupportedError, ConfigurationError: Redis cannot be used; nothing was started.
            EngineStartError: an engine failed to start; the others have been taken down.
            EngineDeadError: no engine is left.
        """
        config = self._config
        await check_redis(config.redis_url, namespace=config.namespace, for_worker=True)
        self._install_signals()
        subscriber = Subscriber(config.redis_url)
        try:
            await subscriber.open()
            await subscriber.subscribe(Keys(config.namespace).worker_commands(config.worker_id), self._on_command)
            for engine in self._engines:
                engine.spawn()
            await self._start()
            await self._serve()
        finally:
            await self._leave()
            await subscriber.close()
        return self._urgency < Urgency.KILL

    async def _start(self) -> None:
        await self._until(
            lambda: (
                self._urgency > Urgency.STAY
                or any(engine.failure or not engine.alive for engine in self._engines)
                or all(engine.state == EngineState.READY for engine in self._engines)
            )
        )
        if self._urgency > Urgency.STAY:
            return
        for engine in self._engines:
            if engine.failure or not engine.alive:
                self._hurry(Urgency.HAND_BACK)
                trace = engine.failure.trace if engine.failure else ""
                raise EngineStartError(engine.cause_of_end(), trace)
        self._serving = True
        self._on_ready()

    async def _serve(self) -> None:
        await self._until(lambda: self._urgency > Urgency.STAY or not self._any_alive())
        if self._urgency == Urgency.STAY:
            causes = dict.fromkeys(engine.cause_of_end() for engine in self._engines)
            raise EngineDeadError(f"no engine is left: {'; '.join(causes)}")

    async def _leave(self) -> None:
        """Take the engines down, step by step, beginning with the one that ``_urgency`` asks for."""
        steps: list[tuple[Urgency, Callable[[EngineProcess], None], float | None]] = [
            (Urgency.DRAIN, EngineProcess.drain, self._drain_patience_s),
            (Urgency.HAND_BACK, EngineProcess.hand_back, HAND_BACK_TIMEOUT_S),
            (Urgency.KILL, EngineProcess.kill, None),
        ]
        for urgency, act, patience_s in steps:
            if self._urgency > urgency:
                continue
            self._urgency = urgency
            leaving = [engine for engine in self._engines if engine.alive]
            if leaving:
                log.info("leaving", step=urgency.name.lower(), engines=[engine.engine_id for engine in leaving])
            for engine in leaving:
                act(engine)
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._until(lambda step=urgency: self._urgency > step or not self._any_alive())
            if not self._any_alive():
                return

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on the engines' states and the urgency."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _any_alive(self) -> bool:
        return any(engine.alive for engine in self._engines)

    def _on_change(self, engine: EngineProcess) -> None:
        self._changed.set()
        log.debug("engine", engine_id=engine.engine_id, state=engine.state.value, exit_code=engine.exit_code)
        # An engine that dies while serving is only reported: the others go on. Restarting it belongs here.
        if self._serving and self._urgency == Urgency.STAY and not engine.alive:
            log.error("engine lost", engine_id=engine.engine_id, cause=engine.cause_of_end())

    def _on_command(self, data: bytes) -> None:
        try:
            command = msgspec.msgpack.decode(data, type=WorkerCommand)
        except msgspec.DecodeError as error:
            log.warning("unreadable command ignored", error=str(error))
            return
        if isinstance(command, DrainCommand):
            if command.timeout_s is not None:
                self._drain_patience_s = min(command.timeout_s, self._drain_patience_s)
            self._hurry(Urgency.DRAIN)
        else:
            self._hurry(Urgency.HAND_BACK)

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        """The first signal drains, the second hands back at once, the third kills."""
        self._hurry(Urgency(min(self._urgency + 1, Urgency.KILL)))

    def _hurry(self, urgency: Urgency) -> None:
        self._urgency = max(self._urgency, urgency)
        self._changed.set()
