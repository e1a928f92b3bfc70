"""Start an engine core, shake hands with it, and exchange messages with it.

core                         worker process
Hello(version, pid)   ──▶
                      ◀──    Configure(config_json)
Ready | StartupFailed ──▶
EngineCoreOutputs     ◀─▶    EngineCoreRequest, AbortRequests, UtilityCall, Shutdown
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ....shared.control.calls import Utility, UtilityAnswer
from ....shared.errors import (
    CacheTooSmallError,
    ConfigurationError,
    DeviceMemoryError,
    EngineCallError,
    EngineDeadError,
    ModelLoadError,
    PenstockError,
    from_wire,
)
from ....shared.messages import WIRE_VERSION
from ....shared.messages.core import (
    AbortRequests,
    Configure,
    CoreInput,
    EngineCoreOutputs,
    Hello,
    LeaveWave,
    Ready,
    Shutdown,
    StartupFailed,
    StartWave,
    UtilityCall,
    UtilityOutput,
)
from ....shared.messages.requests import EngineCoreRequest
from ....shared.messages.supervision import LOAD_TIMED_OUT
from ...config.engine_config import EngineConfig
from ...config.model import CORE_MODULES
from ...processes.host import num_oom_kills
from ...processes.ipc import WorkerChannel, socket_pair
from ...processes.process_tree import Lifeline, kill_process_tree
from ...processes.progress import ProgressReader
from .death import Cause, CoreDeath, CoreTrace, cause_of_exit, cause_of_stall
from .process import CoreProcess, ForkServer, Launch, start_core

SHUTDOWN_TIMEOUT_S = 5.0
# How long a core may take to exit once it has closed the channel.
EXIT_TIMEOUT_S = 10.0
# How long a hanging core may take to write its traceback.
TRACE_TIMEOUT_S = 5.0

_STARTUP_ERRORS: dict[str, type[PenstockError]] = {
    cls.code: cls for cls in (ConfigurationError, CacheTooSmallError, DeviceMemoryError, ModelLoadError)
}


class CoreStartupError(PenstockError):
    """The engine core failed to start for an unexpected reason; ``trace`` is its traceback."""

    code = "core_startup_failed"

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace


class CoreLostError(EngineDeadError):
    """The engine core ended during start-up without reporting an error; ``death`` describes the exit."""

    def __init__(self, death: CoreDeath) -> None:
        super().__init__(f"{death.reason} during start-up")
        self.death = death


class LoadTimeoutError(CoreLostError):
    """The engine core hung while it loaded, and was killed."""

    code = LOAD_TIMED_OUT

    def __init__(self, death: CoreDeath) -> None:
        EngineDeadError.__init__(self, death.reason)
        self.death = death


class CoreClient:
    """The worker process's connection to its engine core.

    Args:
        on_outputs: called with each step's outputs.
        log_options: logging options of the core's command line.
        engine_id: id of the worker process that the core belongs to.
        fork_servers: fork servers that may start the core; empty to start it as a new process.
        may_spawn: whether it may be started as a new process if none of them forks it.

    Attributes:
        dead: set when the core has exited or closed its channel; ``end`` returns the cause.
        progress: progress of the core, in shared memory.
    """

    def __init__(
        self,
        on_outputs: Callable[[EngineCoreOutputs], None],
        log_options: Sequence[str] = (),
        *,
        engine_id: str = "",
        fork_servers: Sequence[ForkServer] = (),
        may_spawn: bool = True,
    ) -> None:
        self._log_options = log_options
        self._engine_id = engine_id
        self._fork_servers = fork_servers
        self._may_spawn = may_spawn
        self._on_outputs = on_outputs
        self._channel = WorkerChannel(self._on_message, self._on_lost)
        self._process: CoreProcess | None = None
        self._handshake: asyncio.Queue[Hello | Ready | StartupFailed | None] = asyncio.Queue()
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[UtilityAnswer]] = {}
        self.dead = asyncio.Event()
        self.progress = ProgressReader()
        self._trace = CoreTrace()
        self._lifeline = Lifeline()
        self._num_oom_kills_before = 0
        self._cause: Cause | None = None
        self._killing: asyncio.Task[None] | None = None
        self._loss: type[CoreLostError] = CoreLostError
        self._is_ready = False

    @property
    def pid(self) -> int:
        """Process id of the core; 0 before its start."""
        return self._process.pid if self._process is not None else 0

    async def start(self, config: EngineConfig, visible_devices: str | None) -> Ready:
        """Start the core and wait until its model is loaded.

        Raises:
            ConfigurationError, ModelLoadError: the core reported an error in its configuration or model.
            CoreStartupError: the core reported another error; carries its traceback.
            CoreLostError: the core ended without a report.
            LoadTimeoutError: the core hung, and ``kill_loading`` was called.
            EngineDeadError: no fork server has forked the core, and it may not be started as a new process.
        """
        ours, theirs = socket_pair()
        self._num_oom_kills_before = await asyncio.to_thread(num_oom_kills)
        launch = Launch(
            engine_id=self._engine_id,
            visible_devices=visible_devices,
            log_options=self._log_options,
            channel=theirs.fileno(),
            progress=self.progress.fd,
            trace=self._trace.fd,
            lifeline=self._lifeline.reader,
            module=CORE_MODULES[config.engine],
            python=config.engine_python,
        )
        self._process = await start_core(launch, self._fork_servers, may_spawn=self._may_spawn)
        theirs.close()
        self._watching = asyncio.create_task(self._await_exit(self._process))
        ours.setblocking(False)
        await self._channel.open(ours)
        hello = await self._expect(Hello)
        if hello.version != WIRE_VERSION:
            raise ConfigurationError(f"the engine core speaks wire version {hello.version}, this worker {WIRE_VERSION}")
        self._send(Configure(config.encode()))
        ready = await self._expect(Ready)
        self._is_ready = True
        return ready

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to the core; its outputs arrive through ``on_outputs``."""
        self._send(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Stop computing these requests; unknown ids are ignored."""
        self._send(AbortRequests(request_ids))

    def tell(self, message: StartWave | LeaveWave) -> None:
        """Send a message of the data-parallel group to the core of a rank."""
        self._send(message)

    async def call(self, call: Utility) -> UtilityAnswer:
        """Send a call to the core and return its answer.

        Raises:
            EngineDeadError: the core has exited, or does not serve yet.
            PenstockError: the core reported that the call failed.
        """
        if self.dead.is_set():
            raise EngineDeadError("the engine core has exited")
        if not self._is_ready:
            raise EngineDeadError("the engine sleeps and its model is not loaded; wake it up first")
        call_id = next(self._call_ids)
        answer: asyncio.Future[UtilityAnswer] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        self._send(UtilityCall(call_id, call))
        return await answer

    async def stop(self) -> None:
        """Ask the core to exit, and kill it after ``SHUTDOWN_TIMEOUT_S``."""
        if self._process is not None:
            self._send(Shutdown())
            try:
                async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                self._kill()
                await self._process.wait()
            self._channel.close()
        self.progress.close()
        self._trace.close()
        self._lifeline.close()

    def kill(self, finding: str) -> None:
        """Kill a core that hangs, after it has written its traceback if it can. ``finding`` describes the hang."""
        if self._killing is None and not self.dead.is_set():
            self._killing = asyncio.create_task(self._kill_hanging(finding))

    def kill_loading(self, finding: str) -> None:
        """Kill a core that hangs while loading; ``start`` then raises ``LoadTimeoutError``."""
        if self._process is not None:
            self._loss = LoadTimeoutError
            self.kill(finding)

    def end_for(self, reason: str) -> None:
        """Kill a core that cannot continue for an external ``reason``, which is not the fault of its requests."""
        if self._process is not None and not self.dead.is_set():
            self._cause = Cause(reason, is_external=True)
            self._kill()

    async def end(self) -> CoreDeath:
        """Wait for the end of the core and return its cause. Kill a core that closed its channel but does not exit."""
        assert self._process is not None
        await self.dead.wait()
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                returncode = await self._process.wait()
        except TimeoutError:
            returncode = None
            self._kill()
            await self._process.wait()
        trace = self._trace.read()
        if self._cause is None:
            oom_kills = await asyncio.to_thread(num_oom_kills) - self._num_oom_kills_before
            self._cause = cause_of_exit(returncode, num_oom_kills=oom_kills, trace=trace)
        return CoreDeath(*self._cause, self.progress.read().step_counter, trace)

    async def _kill_hanging(self, finding: str) -> None:
        assert self._process is not None
        cause = await asyncio.to_thread(cause_of_stall, finding, self._process.pid)
        if not cause.is_external:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGUSR1)
            await self._trace.settle(TRACE_TIMEOUT_S)
        if not self.dead.is_set():
            self._cause = cause
            # Also kill its children, such as a compiler or a server: they would continue, and it may wait for them.
            await asyncio.to_thread(kill_process_tree, self._process.pid)
            self._kill()

    def _kill(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):  # it has ended meanwhile
            self._process.send_signal(signal.SIGKILL)

    def _send(self, message: CoreInput) -> None:
        self.progress.num_messages_sent += 1
        self._channel.send(message)

    async def _expect(self, kind: type[Any]) -> Any:
        message = await self._handshake.get()
        if message is None:
            raise self._loss(await self.end())
        if isinstance(message, StartupFailed):
            error_type = _STARTUP_ERRORS.get(message.code)
            raise error_type(message.message) if error_type else CoreStartupError(message.message, message.trace)
        if not isinstance(message, kind):
            raise EngineDeadError(f"the engine core sent {type(message).__name__} instead of {kind.__name__}")
        return message

    async def _await_exit(self, process: CoreProcess) -> None:
        """Wait for the exit of the process, in case another process holds its socket open."""
        await process.wait()
        self._on_lost()

    def _on_message(self, message: Any) -> None:
        if isinstance(message, EngineCoreOutputs):
            self._on_outputs(message)
        elif isinstance(message, UtilityOutput):
            self._answer(message)
        else:
            self._handshake.put_nowait(message)

    def _answer(self, output: UtilityOutput) -> None:
        answer = self._calls.pop(output.call_id, None)
        if answer is None or answer.done():
            return
        if output.answer is not None:
            answer.set_result(output.answer)
        elif output.error is not None:
            answer.set_exception(from_wire(output.error.code, output.error.message, retryable=False))
        else:
            answer.set_exception(EngineCallError("the engine core returned neither an answer nor an error"))

    def _on_lost(self) -> None:
        if self.dead.is_set():
            return
        self.dead.set()
        self._handshake.put_nowait(None)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDeadError("the engine core has exited"))
        self._calls.clear()
