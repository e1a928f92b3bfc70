"""The process of an engine core: the handshake with its worker process, and the busy loop.

Hello(version, pid)   ──▶
                      ◀──   Configure(config_json)
Ready | StartupFailed ──▶
EngineCoreOutputs     ◀─▶   EngineCoreRequest, AbortRequests, UtilityCall, Shutdown

In addition to the messages, the core writes what it is doing to shared memory (``worker/processes/progress.py``).
If it dies, it writes the traceback to a file, which the worker process reads afterwards.
"""

from __future__ import annotations

import errno
import os
import signal
import time
import traceback
from typing import Any

import structlog

from ...shared.errors import (
    ConfigurationError,
    DeviceMemoryError,
    EngineDeadError,
    GroupBrokenError,
    ValidationError,
)
from ...shared.messages import WIRE_VERSION
from ...shared.messages.core import (
    AbortRequests,
    Configure,
    EngineCoreOutput,
    EngineCoreOutputs,
    Hello,
    LeaveWave,
    Shutdown,
    StartupFailed,
    StartWave,
    UtilityCall,
)
from ...shared.messages.requests import EngineCoreRequest
from ...shared.process.boundary import unforeseen
from ..config.engine_config import EngineConfig
from ..processes.ipc import GROUP_BROKEN, CoreChannel, Undecodable
from ..processes.progress import Phase, ProgressWriter
from ..request_checks import refusal
from . import exit_report
from .garbage import freeze_loaded_objects
from .interface import BuildEngine, Engine, GroupCore

# Reading it from torch takes about as long as a small step.
DEVICE_MEMORY_INTERVAL_S = 1.0

log = structlog.get_logger(__name__)


class CoreLoop:
    """Turns messages into calls of a ``Core`` and its ``Control``, and their results into messages."""

    def __init__(self, channel: CoreChannel, engine: Engine, progress: ProgressWriter) -> None:
        self._channel = channel
        self._core = engine.core
        self._control = engine.control
        self._progress = progress
        self._device_memory_bytes = 0
        self._device_memory_due_s = 0.0
        self._is_stopping = False
        self._unanswered: list[UtilityCall] = []

    def run(self, backlog: list[Any]) -> None:
        """Work until Shutdown arrives or the worker process exits.

        Args:
            backlog: messages that arrived during start-up.

        Raises:
            InvariantError: the bookkeeping contradicts itself.
            EngineDeadError: the accelerator is lost.
        """
        messages = backlog
        while True:
            for message in messages:
                self._handle(message)
                self._progress.take_message(self._core.num_unfinished_requests)
            if self._is_stopping:
                return
            if self._core.has_work or self._unanswered:
                self._step()
                self._unanswered = [call for call in self._unanswered if not self._is_answered(call)]
                messages = self._channel.receive(0)
            else:
                self._core.check_invariants()
                # Report the idle state, because an abort may have ended the last requests without a step.
                self._send([])
                self._progress.enter(Phase.IDLE)
                messages = self._await_messages()

    def _await_messages(self) -> list[Any]:
        """Wait for messages, and prepare later steps part by part meanwhile."""
        is_left = True
        while is_left:
            if messages := self._channel.receive(0):
                return messages
            is_left = self._core.prepare_more()
        return self._channel.receive(None)

    def _step(self) -> None:
        self._progress.enter(Phase.STEPPING)
        outputs = self._core.step_fn()
        self._progress.end_step(self._core.num_unfinished_requests)
        self._send(outputs)

    def _send(self, outputs: list[EngineCoreOutput]) -> None:
        now = time.monotonic()
        if now >= self._device_memory_due_s:
            self._device_memory_bytes = self._core.device_memory_bytes
            self._device_memory_due_s = now + DEVICE_MEMORY_INTERVAL_S
        stats = self._core.stats()
        stats.device_memory_bytes = self._device_memory_bytes
        self._channel.send(
            EngineCoreOutputs(outputs, stats, now, self._core.take_step_stats(), self._core.take_lora_digests())
        )

    def _handle(self, message: Any) -> None:
        if isinstance(message, EngineCoreRequest):
            self._answer(self._add_request(message))
        elif isinstance(message, AbortRequests):
            self._core.abort_requests(message.request_ids)
        elif isinstance(message, UtilityCall):
            if outputs := self._core.settle():
                self._send(outputs)
            if not self._is_answered(message):
                self._unanswered.append(message)
        elif isinstance(message, Shutdown):
            self._is_stopping = True
        elif isinstance(message, StartWave | LeaveWave) and isinstance(self._core, GroupCore):
            self._core.handle_wave_message(message)
        elif isinstance(message, Undecodable):
            self._refuse_undecodable(message)
        else:
            log.warning("unexpected_message", kind=type(message).__name__)

    def _add_request(self, message: EngineCoreRequest) -> EngineCoreOutput | None:
        """Queue a request. If that fails, end the request and keep running.

        Raises:
            EngineDeadError, GroupBrokenError: the engine cannot continue; the request is not the cause.
        """
        try:
            return self._core.add_request(message)
        except (EngineDeadError, GroupBrokenError):
            raise
        except BaseException as error:  # a panic in a Rust library is not an Exception
            self._core.abort_requests([message.request_id])
            failure = unforeseen(error, {"request_id": message.request_id})
            return refusal(message.request_id, failure)

    def _is_answered(self, call: UtilityCall) -> bool:
        """Run ``call``, send its answer if there is one, and return whether there was."""
        answer = self._control.answer(call)
        if answer is not None:
            self._channel.send(answer)
        return answer is not None

    def _refuse_undecodable(self, message: Undecodable) -> None:
        """Refuse a request that cannot be decoded, if at least its id can."""
        log.error("message_undecodable", error=message.reason, request_id=message.request_id)
        if message.request_id is not None:
            self._answer(refusal(message.request_id, ValidationError(message.reason)))

    def _answer(self, output: EngineCoreOutput | None) -> None:
        if output is not None:
            self._send([output])


def run_engine_core(channel: CoreChannel, progress: ProgressWriter, build: BuildEngine) -> int:
    """Shake hands, load, serve; return the exit status of the process.

    Args:
        build: builds the engine from the configuration that the worker process sends.
    """
    # A terminal or systemd stops a whole process group, but only the worker process should react: it drains first, then
    # sends Shutdown or closes the channel.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine: Engine | None = None
    try:
        channel.send(Hello(WIRE_VERSION, os.getpid()))
        backlog = channel.receive(None)
        while not backlog:
            backlog = channel.receive(None)
        engine = _start(channel, backlog.pop(0), progress, build)
        if engine is None:
            return 1
        CoreLoop(channel, engine, progress).run(backlog)
        engine.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # Before the engine serves, the worker process has abandoned the start and logs the reason itself.
        if engine is not None:
            log.warning("worker_process_gone")
    except BaseException as error:  # a panic in a Rust library is not an Exception
        log.exception("engine_core_died")
        exit_report.write(traceback.format_exc())
        return GROUP_BROKEN if isinstance(error, GroupBrokenError) else 1
    return 0


def lacks_memory(error: BaseException | None) -> bool:
    """Return whether memory that was not free caused an error: memory of the host or of a GPU."""
    while error is not None:
        # torch, which not every core has, raises a RuntimeError for memory of the host.
        is_torchs = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
        if isinstance(error, (MemoryError, DeviceMemoryError)) or is_torchs:
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        error = error.__cause__ or error.__context__
    return False


def _start(channel: CoreChannel, first: Any, progress: ProgressWriter, build: BuildEngine) -> Engine | None:
    """Build and announce the engine that ``first`` configures; None if that failed and the reason was sent."""
    started = time.monotonic()
    try:
        if not isinstance(first, Configure):
            raise ConfigurationError(f"the worker process sent {type(first).__name__} instead of Configure")
        engine = build(EngineConfig.decode(first.config_json), progress)
    except ConfigurationError as error:
        channel.send(StartupFailed(DeviceMemoryError.code if lacks_memory(error) else error.code, str(error)))
        return None
    except GroupBrokenError:
        raise
    except Exception as error:
        code = DeviceMemoryError.code if lacks_memory(error) else "core_startup_failed"
        channel.send(StartupFailed(code, f"{type(error).__name__}: {error}", traceback.format_exc()))
        return None
    freeze_loaded_objects()
    engine.ready.load_time_s = time.monotonic() - started
    # Before Ready is sent: from then on the worker process takes a core without progress for hung.
    progress.take_message(num_unfinished_reqs=0)
    progress.enter(Phase.IDLE)
    channel.send(engine.ready)
    return engine
