"""One life of an engine as the supervisor sees it: configuration in, status lines out, and the end of its process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import IO

import msgspec
import structlog

from ...shared.errors import RedisUnavailableError
from ...shared.messages.worker_status import EngineState, WorkerStatus
from ..config.worker_config import WorkerConfig
from ..process_tree import group_lives, is_stopped, kill_process_tree
from ..starvation import waited_for_processor_s
from .restart import Death
from .worker_process import WorkerProcess, start_worker

# A status may carry a long traceback.
MAX_STATUS_LINE_BYTES = 1 << 22
# Its last words are in the pipe already; the end of the pipe comes when its engine core has gone, too.
LAST_WORDS_TIMEOUT_S = 2.0
# A killed core gives its GPU memory back only when it is gone, and the next one measures what is free.
GROUP_END_TIMEOUT_S = 5.0
GROUP_POLL_S = 0.02
SIGNALS_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}

log = structlog.get_logger()


class EngineProcess:
    """A worker process, and through it one engine. ``on_change`` is called when any attribute has changed.

    Attributes:
        state: what it last reported.
        failure: its last report of a failure, if it made one.
        ended: set with ``exit_code``.
        heard_at: when its last line came, by the loop's clock; before the first, when it was started.
        has_spoken: whether a line came at all.
        heartbeat: the last ``EngineHeartbeat`` that it told, as JSON; empty before the first.
        weights: folder and version of weights that were put in the place of the configured ones; empty before.
        exit_code: as ``Popen.returncode``, None while it lives; set after its last words were read.
    """

    def __init__(self, config: WorkerConfig, on_change: Callable[[EngineProcess], None]) -> None:
        self.engine_id = config.engine_id
        self.state = EngineState.STARTING
        self.failure: WorkerStatus | None = None
        self.heard_at = 0.0
        self.has_spoken = False
        self.heartbeat = b""
        self.weights = ("", "")
        self.exit_code: int | None = None
        self.ended = asyncio.Event()
        self._config = config
        self._on_change = on_change
        self._num_tokens = 0
        self._had_waited_s = 0.0
        self._silence: Death | None = None
        self._is_killed = False
        self._process: WorkerProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def alive(self) -> bool:
        return self._process is not None and self.exit_code is None

    async def start(self) -> None:
        """Start the process and tell it its configuration.

        Raises:
            OSError: the host has no room for another process.
        """
        process = await start_worker(self._config)
        self._process = process
        self.heard_at = asyncio.get_running_loop().time()
        # The configuration fits into the pipe; if the process is dead already, its exit is reported below.
        with suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(self._config) + b"\n")
            process.stdin.flush()
        reading = asyncio.create_task(self._read_statuses(process.stdout))
        self._tasks = [reading, asyncio.create_task(self._see_end(process, reading))]

    def drain(self) -> None:
        """Ask it to finish what runs, for as long as its configuration allows, and leave."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def hand_back(self) -> None:
        """Ask it to hand back what runs and leave at once: the end of its life line says so."""
        self.drain()
        self._close_life_line()

    def kill(self) -> None:
        """Kill it and everything it started."""
        # Never after its end: the pid may be somebody else's by then.
        if self._process is not None and self.alive:
            self._is_killed = True
            kill_process_tree(self._process.pid)

    def starved_s(self) -> float:
        """How long it has waited for a processor since its last line."""
        return self._waited_s() - self._had_waited_s

    @property
    def was_put_down(self) -> bool:
        """Whether its supervisor killed it for nothing but not leaving soon enough."""
        has_failed = self.failure is not None and not self.failure.is_external
        return self._is_killed and self._silence is None and not has_failed

    async def gone(self) -> None:
        """Wait, after its end, until nothing is left of what it started; not for ever, should something be stuck."""
        if self._process is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(GROUP_END_TIMEOUT_S):
                while group_lives(self._process.pid):  # noqa: ASYNC110  # who is not our child tells us nothing
                    await asyncio.sleep(GROUP_POLL_S)

    def end_silence(self, silence_s: float) -> None:
        """Kill it for having said nothing for so long; once is enough."""
        if self._process is None or self._silence is not None:
            return
        stopped = is_stopped(self._process.pid)
        reason = f"the worker process said nothing for {silence_s:.1f} s: it {'was stopped' if stopped else 'hangs'}"
        self._silence = Death(reason, is_external=stopped)
        self.kill()

    def death(self) -> Death:
        """Say why it ended; in its own words where it left some."""
        return msgspec.structs.replace(self._cause(), num_tokens=self._num_tokens)

    def _cause(self) -> Death:
        failure = self.failure
        if failure is not None:
            # A Redis that is away ends every engine, and starting it again is the right thing to do.
            is_external = failure.is_external or failure.code == RedisUnavailableError.code
            return Death(failure.message, is_external=is_external, trace=failure.trace)
        if self._silence is not None:
            return self._silence
        if self.exit_code is not None and self.exit_code < 0:
            number = signal.Signals(-self.exit_code)
            return Death(f"the worker process was killed by {number.name}", is_external=number in SIGNALS_FROM_OUTSIDE)
        # Status 0 is a drain that somebody asked the worker process for.
        return Death(f"the worker process ended with status {self.exit_code}", is_external=self.exit_code == 0)

    async def _see_end(self, process: WorkerProcess, reading: asyncio.Task[None]) -> None:
        try:
            status = await process.wait()
            # A worker that crashed leaves its engine core behind, which would keep the GPU and our pipe open.
            kill_process_tree(process.pid)
        finally:
            self._close_life_line()
        await asyncio.wait([reading], timeout=LAST_WORDS_TIMEOUT_S)
        reading.cancel()
        self.exit_code = status
        self.ended.set()
        self._on_change(self)

    async def _read_statuses(self, pipe: IO[bytes]) -> None:
        reader = asyncio.StreamReader(limit=MAX_STATUS_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while line := await reader.readline():
                self._take_line(line)
        finally:
            transport.close()

    def _take_line(self, line: bytes) -> None:
        try:
            status = msgspec.json.decode(line, type=WorkerStatus)
        except msgspec.DecodeError:
            # The engine core shares this pipe, and libraries print.
            log.info("engine_output", engine_id=self.engine_id, line=line.decode(errors="replace").rstrip())
            return
        if status.state != self.state:
            log.debug("engine_state", engine_id=self.engine_id, state=status.state.value)
        self.state = status.state
        self.has_spoken = True
        self.heard_at = asyncio.get_running_loop().time()
        self._had_waited_s = self._waited_s()
        self._num_tokens = max(self._num_tokens, status.num_tokens)
        self.heartbeat = bytes(status.heartbeat) or self.heartbeat
        if status.weights_folder:
            self.weights = (status.weights_folder, status.weights_version)
        if status.state == EngineState.FAILED:
            self.failure = status
        self._on_change(self)

    def _waited_s(self) -> float:
        return waited_for_processor_s(self._process.pid) if self._process is not None and self.alive else 0.0

    def _close_life_line(self) -> None:
        if self._process is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
