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
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ...shared.errors import ConfigurationError, EngineDeadError, ModelLoadError, PenstockError
from ...shared.messages import (
    WIRE_VERSION,
    AbortRequests,
    Configure,
    EngineCoreOutputs,
    EngineCoreRequest,
    Hello,
    Ready,
    Shutdown,
    StartupFailed,
    Utility,
    UtilityCall,
    UtilityOutput,
)
from ..config import EngineConfig
from ..ipc import WorkerChannel, socket_pair

SHUTDOWN_TIMEOUT_S = 5.0

_STARTUP_ERRORS: dict[str, type[PenstockError]] = {cls.code: cls for cls in (ConfigurationError, ModelLoadError)}


class CoreStartupError(PenstockError):
    """The engine core could not start for a reason nobody foresaw; ``trace`` is its own traceback."""

    code = "core_startup_failed"

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace


class CoreClient:
    """The worker process's hold on its engine core. ``dead`` is set when the core is gone, for whatever reason.

    Args:
        on_outputs: called with each step's outputs.
        log_options: options of the core's command line that say how it logs.
    """

    def __init__(self, on_outputs: Callable[[EngineCoreOutputs], None], log_options: Sequence[str] = ()) -> None:
        self._log_options = log_options
        self._on_outputs = on_outputs
        self._channel = WorkerChannel(self._on_message, self._on_lost)
        self._process: asyncio.subprocess.Process | None = None
        self._handshake: asyncio.Queue[Hello | Ready | StartupFailed | None] = asyncio.Queue()
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.dead = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id of the core; 0 before it was started."""
        return self._process.pid if self._process is not None else 0

    async def start(self, config: EngineConfig, visible_devices: str | None) -> Ready:
        """Spawn the core and wait until its model is loaded.

        Raises:
            ConfigurationError, ModelLoadError: what the core says is wrong with its configuration or model.
            CoreStartupError: it failed in another way; carries its traceback.
            EngineDeadError: it died without a word; the message has its exit status.
        """
        ours, theirs = socket_pair()
        environment = dict(os.environ)
        if visible_devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible_devices
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock.worker.engine",
            "--fd",
            str(theirs.fileno()),
            *self._log_options,
            env=environment,
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
        )
        theirs.close()
        self._watching = asyncio.create_task(self._watch(self._process))
        ours.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self._channel, sock=ours)
        hello = await self._expect(Hello)
        if hello.version != WIRE_VERSION:
            raise ConfigurationError(f"the engine core speaks wire version {hello.version}, this worker {WIRE_VERSION}")
        self._channel.send(Configure(config.encode()))
        return await self._expect(Ready)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request over; its outputs come through ``on_outputs``."""
        self._channel.send(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Stop computing these; unknown ones are ignored."""
        self._channel.send(AbortRequests(request_ids))

    async def call(self, call: Utility) -> dict[str, Any]:
        """Ask the core something and return its answer.

        Raises:
            EngineDeadError: the core is gone, or says that the call failed.
        """
        if self.dead.is_set():
            raise EngineDeadError("the engine core is gone")
        call_id = next(self._call_ids)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        self._channel.send(UtilityCall(call_id, call))
        return await answer

    async def stop(self) -> None:
        """End the core: asked first, killed after ``SHUTDOWN_TIMEOUT_S``."""
        if self._process is None:
            return
        self._channel.send(Shutdown())
        try:
            await asyncio.wait_for(self._process.wait(), SHUTDOWN_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._channel.close()

    async def exit_status(self) -> str:
        """How the core ended, in words; waits for the end."""
        assert self._process is not None
        code = await self._process.wait()
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"

    async def _expect(self, kind: type[Any]) -> Any:
        message = await self._handshake.get()
        if message is None:
            raise EngineDeadError(f"the engine core ended during start-up ({await self.exit_status()})")
        if isinstance(message, StartupFailed):
            known = _STARTUP_ERRORS.get(message.code)
            raise known(message.message) if known else CoreStartupError(message.message, message.trace)
        if not isinstance(message, kind):
            raise EngineDeadError(f"the engine core sent {type(message).__name__} where {kind.__name__} was due")
        return message

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
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
        if output.failure_message is not None:
            answer.set_exception(EngineDeadError(f"the engine core failed the call: {output.failure_message}"))
        else:
            answer.set_result(output.result or {})

    def _on_lost(self) -> None:
        if self.dead.is_set():
            return
        self.dead.set()
        self._handshake.put_nowait(None)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDeadError("the engine core is gone"))
        self._calls.clear()
