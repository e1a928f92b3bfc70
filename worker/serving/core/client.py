"""Starts an engine core, shakes hands with it, and talks to it.

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
    ConfigurationError,
    EngineCallError,
    EngineDeadError,
    ModelLoadError,
    PenstockError,
    from_wire,
)
from ....shared.messages import WIRE_VERSION
from ....shared.messages.from_core import EngineCoreOutputs, Hello, Ready, StartupFailed, UtilityOutput
from ....shared.messages.requests import EngineCoreRequest
from ....shared.messages.to_core import AbortRequests, Configure, CoreInput, Shutdown, UtilityCall
from ....shared.messages.waves import LeaveWave, StartWave
from ...config.engine_config import EngineConfig
from ...config.model import CORE_MODULES
from ...host import num_oom_kills
from ...ipc import WorkerChannel, socket_pair
from ...process_tree import kill_process_tree
from ...progress import ProgressReader
from .death import Cause, CoreDeath, cause_of_exit, cause_of_stall
from .process import CoreProcess, Launch, start_core
from .trace import CoreTrace

SHUTDOWN_TIMEOUT_S = 5.0
# How long a core may take to end once it has let go of the channel.
EXIT_TIMEOUT_S = 10.0
# How long a hanging core is given to write down where it hangs.
TRACE_TIMEOUT_S = 5.0

_STARTUP_ERRORS: dict[str, type[PenstockError]] = {cls.code: cls for cls in (ConfigurationError, ModelLoadError)}


class CoreStartupError(PenstockError):
    """The engine core could not start for a reason nobody foresaw; ``trace`` is its own traceback."""

    code = "core_startup_failed"

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace


class CoreLostError(EngineDeadError):
    """The engine core ended during start-up, without saying what is wrong; ``death`` is what is known."""

    def __init__(self, death: CoreDeath) -> None:
        super().__init__(f"{death.reason} during start-up")
        self.death = death


class LoadTimeoutError(CoreLostError):
    """The engine core hung while it loaded, and was killed."""

    code = "load_timed_out"

    def __init__(self, death: CoreDeath) -> None:
        EngineDeadError.__init__(self, death.reason)
        self.death = death


class CoreClient:
    """The worker process's hold on its engine core.

    Args:
        on_outputs: called with each step's outputs.
        log_options: options of the core's command line that say how it logs.
        engine_id: whose core it is.
        fork_server: socket of the fork server that starts it; without one it is started by itself.

    Attributes:
        dead: set when the core is gone, for whatever reason; ``end`` says which.
        progress: what the core is doing, known without asking it.
    """

    def __init__(
        self,
        on_outputs: Callable[[EngineCoreOutputs], None],
        log_options: Sequence[str] = (),
        *,
        engine_id: str = "",
        fork_server: str = "",
    ) -> None:
        self._log_options = log_options
        self._engine_id = engine_id
        self._fork_server = fork_server
        self._on_outputs = on_outputs
        self._channel = WorkerChannel(self._on_message, self._on_lost)
        self._process: CoreProcess | None = None
        self._handshake: asyncio.Queue[Hello | Ready | StartupFailed | None] = asyncio.Queue()
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[UtilityAnswer]] = {}
        self.dead = asyncio.Event()
        self.progress = ProgressReader()
        self._trace = CoreTrace()
        self._num_oom_kills_before = 0
        self._cause: Cause | None = None
        self._killing: asyncio.Task[None] | None = None
        self._loss: type[CoreLostError] = CoreLostError

    @property
    def pid(self) -> int:
        """Process id of the core; 0 before it was started."""
        return self._process.pid if self._process is not None else 0

    async def start(self, config: EngineConfig, visible_devices: str | None) -> Ready:
        """Start the core and wait until its model is loaded.

        Raises:
            ConfigurationError, ModelLoadError: what the core says is wrong with its configuration or model.
            CoreStartupError: it failed in another way; carries its traceback.
            CoreLostError: it died without a word.
            LoadTimeoutError: it hung, and ``kill_loading`` was called.
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
            module=CORE_MODULES[config.engine],
            python=config.engine_python,
        )
        self._process = await start_core(launch, self._fork_server)
        theirs.close()
        self._watching = asyncio.create_task(self._watch(self._process))
        ours.setblocking(False)
        await self._channel.open(ours)
        hello = await self._expect(Hello)
        if hello.version != WIRE_VERSION:
            raise ConfigurationError(f"the engine core speaks wire version {hello.version}, this worker {WIRE_VERSION}")
        self._send(Configure(config.encode()))
        return await self._expect(Ready)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request over; its outputs come through ``on_outputs``."""
        self._send(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Stop computing these; unknown ones are ignored."""
        self._send(AbortRequests(request_ids))

    def tell(self, message: StartWave | LeaveWave) -> None:
        """Hand on what the core of a rank has to hear of its group."""
        self._send(message)

    async def call(self, call: Utility) -> UtilityAnswer:
        """Ask the core something and return its answer.

        Raises:
            EngineDeadError: the core is gone.
            PenstockError: it says that the call failed, and how.
        """
        if self.dead.is_set():
            raise EngineDeadError("the engine core is gone")
        call_id = next(self._call_ids)
        answer: asyncio.Future[UtilityAnswer] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        self._send(UtilityCall(call_id, call))
        return await answer

    async def stop(self) -> None:
        """End the core: asked first, killed after ``SHUTDOWN_TIMEOUT_S``."""
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

    def kill(self, finding: str) -> None:
        """Kill a core that hangs, once it has written down where, if it can. ``finding`` is the stall watch's."""
        if self._killing is None and not self.dead.is_set():
            self._killing = asyncio.create_task(self._kill_hanging(finding))

    def kill_loading(self, finding: str) -> None:
        """``kill`` a core that hangs while ``start`` waits for it, which then says so."""
        if self._process is not None:
            self._loss = LoadTimeoutError
            self.kill(finding)

    def end_for(self, reason: str) -> None:
        """Kill a core that cannot go on, for which neither it nor its requests are to blame."""
        if self._process is not None and not self.dead.is_set():
            self._cause = Cause(reason, is_external=True)
            self._kill()

    async def end(self) -> CoreDeath:
        """Say how the core ended; waits for its end, and helps if it lets go of the channel but does not exit."""
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
            # With what it has started, a compiler or a server, which would go on, and may be what it waits for.
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
            known = _STARTUP_ERRORS.get(message.code)
            raise known(message.message) if known else CoreStartupError(message.message, message.trace)
        if not isinstance(message, kind):
            raise EngineDeadError(f"the engine core sent {type(message).__name__} where {kind.__name__} was due")
        return message

    async def _watch(self, process: CoreProcess) -> None:
        """The process's own end counts too, should somebody else hold its socket open."""
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
            answer.set_exception(EngineCallError("the engine core gave neither an answer nor an error"))

    def _on_lost(self) -> None:
        if self.dead.is_set():
            return
        self.dead.set()
        self._handshake.put_nowait(None)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDeadError("the engine core is gone"))
        self._calls.clear()
