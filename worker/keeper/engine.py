"""Engine of a model on a device that several models share: its process starts and ends when the keeper says so.

parked ──load──▶ starting ──READY──▶ serving ──end──▶ parked
   ▲                 └─failure─▶ parked    └──death──▶ down, until the keeper starts it again
   └── its first start
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from ...shared.control.engine import WakeUp
from ...shared.deployment.records import EngineHeartbeat
from ...shared.errors import CacheTooSmallError, DeviceMemoryError, EngineCallError, EngineDeadError, PenstockError
from ...shared.messages.supervision import LOAD_TIMED_OUT, STALLED
from ...shared.process.waiting import wait_at_most
from ..config.worker_config import WorkerConfig
from ..processes.host import is_overloaded
from ..supervisor.reaper import Reaper
from ..supervisor.restart import Death, Phase, RestartPolicy
from ..supervisor.scaling import HAND_BACK_TIMEOUT_S
from ..supervisor.supervised_engine import Engine


class ModelStartError(PenstockError):
    """End of a process that loaded or woke a model.

    Args:
        trace: its traceback if no sentence explains the cause.
        is_external: whether the cause was outside: a signal, a Redis that did not answer, or other processes that had
            the processors.
    """

    code = "model_start_failed"

    def __init__(self, message: str, trace: str = "", *, is_external: bool = False) -> None:
        super().__init__(message)
        self.trace = trace
        self.is_external = is_external


class SharedEngine(Engine):
    """An engine without a process until ``load``. Arguments are those of ``Engine``."""

    def __init__(self, config: WorkerConfig, reaper: Reaper, on_change: Callable[[], None]) -> None:
        super().__init__(config, reaper, on_change)
        self.is_restarted = True
        self.policy = RestartPolicy(phase=Phase.PARKED)
        self._next_config: WorkerConfig | None = None
        self._is_due = asyncio.Event()
        self._has_no_process = asyncio.Event()
        self._has_no_process.set()
        self._is_ending = False
        self._started: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Run a worker process whenever one is started, until the engine is stopped."""
        try:
            while await self._is_started():
                self.policy.starting()
                await self._run_process()
                self._after_process()
                await self._reclaim()
                await self.process.gone()
                self._has_no_process.set()
                self._report_end()
            self.policy.leave()
        finally:
            self.process.kill()
            self._has_no_process.set()
            self._report_end()

    async def load(self, cache_bytes: int | None) -> None:
        """Load the model in a new process, and return when it serves.

        Args:
            cache_bytes: bytes of its KV cache; None for those of the configuration.

        Raises:
            CacheTooSmallError: the cache is too small for a request.
            DeviceMemoryError: the memory for it is not free.
            ModelStartError: it did not start; the message has the reason.
        """
        await self._has_no_process.wait()
        if cache_bytes is not None:
            engine = msgspec.structs.replace(self._config.engine, kv_cache_memory=cache_bytes)
            self._config = msgspec.structs.replace(self._config, engine=engine)
        self._started = asyncio.get_running_loop().create_future()
        self._is_ending = False
        if self.policy.phase is Phase.PARKED:
            self.death = None
        self._has_no_process.clear()
        self._is_due.set()
        await self._started

    async def wake_up(self) -> None:
        """Wake the model in its sleeping process.

        Raises:
            ModelStartError: the process, or its core, has ended; the message has the reason.
            EngineCallError: the model sleeps on.
        """
        process = self.process
        try:
            state = await process.order(WakeUp())
        except EngineDeadError as error:
            raise start_error(await process.cause_of_death()) from error
        if state.is_sleeping:
            raise EngineCallError(f"model {self.config.engine.model_name} sleeps on after a call to wake up")

    async def end_process(self) -> None:
        """End the process, which sleeps, and wait until it and its children have ended."""
        self._is_ending = True
        self.process.drain()
        await wait_at_most(HAND_BACK_TIMEOUT_S, self._has_no_process.wait())
        self.process.kill()
        await self._has_no_process.wait()

    def revive(self) -> None:
        """Forget former deaths of an engine that was given up."""
        if self.policy.phase is Phase.GIVEN_UP:
            self.policy = RestartPolicy(phase=Phase.PARKED)

    @property
    def sleep_level(self) -> int | None:
        """Level at which it sleeps, 0 if it is awake; None without a process that serves."""
        return self.process.sleep_level if self.process.alive and self.policy.phase is Phase.SERVING else None

    def notice(self) -> EngineHeartbeat | None:
        # A model without a process is no dead engine: records of the device describe it.
        return None

    def heartbeat_unless_left(self) -> EngineHeartbeat | None:
        return self.heartbeat() if self.process.alive else None

    @property
    def unreadiness(self) -> str:
        return ""

    async def _is_started(self) -> bool:
        leaving = asyncio.create_task(self._leaving.wait())
        due = asyncio.create_task(self._is_due.wait())
        await asyncio.wait([leaving, due], return_when=asyncio.FIRST_COMPLETED)
        for task in (leaving, due):
            task.cancel()
        self._is_due.clear()
        # The next process loads the model, whatever the level at which the former one slept.
        self.process.sleep_level = 0
        return not self._leaving.is_set()

    def _after_process(self) -> None:
        """Enter the phase that follows from the end of the process."""
        was_serving = self.policy.phase is Phase.SERVING
        if was_serving and not (self._is_ending or self._leaving.is_set()):
            self._record_death()
        elif not self._leaving.is_set():
            self.policy.park()

    def _report_end(self) -> None:
        """Tell the caller of ``load`` that the process has ended before it served."""
        if self._started is not None and not self._started.done():
            death = self.death or Death("the worker is stopping", is_external=True)
            self._started.set_exception(start_error(death))
            self._started.exception()  # the caller may have been cancelled
        self._on_change()

    def _on_process_change(self, process: object) -> None:
        super()._on_process_change(self.process)
        if self.policy.phase is Phase.SERVING and self._started is not None and not self._started.done():
            self._started.set_result(None)


def start_error(death: Death) -> PenstockError:
    """Return the error of a model whose process has ended while it loaded or woke."""
    for error_type in (CacheTooSmallError, DeviceMemoryError):
        if death.code == error_type.code:
            return error_type(death.reason)
    # On a busy machine everything stalls. A model that stalls on a quiet one does so by itself.
    is_slow = death.code in (STALLED, LOAD_TIMED_OUT) and is_overloaded()
    return ModelStartError(death.reason, death.trace, is_external=death.is_external or is_slow)
