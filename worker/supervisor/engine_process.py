"""One worker process as the supervisor sees it: configuration in, status lines out, and its death."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO

import msgspec
import structlog

from ...shared.messages import EngineState, WorkerStatus
from ..config import WorkerConfig
from .process_tree import kill_process_tree

COMMAND = (sys.executable, "-m", "penstock.worker.serving")
# A status may carry a long traceback.
MAX_STATUS_LINE_BYTES = 1 << 22
LAST_WORDS_TIMEOUT_S = 1.0

log = structlog.get_logger()


class EngineProcess:
    """A worker process, and through it one engine. ``on_change`` is called when any attribute has changed.

    Attributes:
        state: what it last reported.
        failure: its last report of a failure, if it made one.
        exit_code: as ``Popen.returncode``, None while it lives; set after its last words were read.
    """

    def __init__(self, config: WorkerConfig, on_change: Callable[[EngineProcess], None]) -> None:
        self.engine_id = config.engine_id
        self.state = EngineState.STARTING
        self.failure: WorkerStatus | None = None
        self.exit_code: int | None = None
        self._config = config
        self._on_change = on_change
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def alive(self) -> bool:
        return self._process is not None and self.exit_code is None

    def spawn(self) -> None:
        """Start the process, in a session of its own: Ctrl-C reaches the supervisor only, which decides."""
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        # The configuration fits into the pipe; if the process is dead already, its exit is reported below.
        with suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(self._config) + b"\n")
            process.stdin.flush()
        reading = asyncio.create_task(self._read_statuses(process.stdout))
        self._tasks = [reading]
        self._watch_exit(process, reading)

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
        if self._process is not None:
            kill_process_tree(self._process.pid)

    def cause_of_end(self) -> str:
        """Say in a phrase why it ended; its own words where it left some."""
        if self.failure is not None:
            return self.failure.message
        if self.exit_code is not None and self.exit_code < 0:
            return f"the worker process was killed by {signal.Signals(-self.exit_code).name}"
        return f"the worker process ended with status {self.exit_code}"

    def _watch_exit(self, process: subprocess.Popen[bytes], reading: asyncio.Task[None]) -> None:
        """Wait in a thread of its own: the default executor has too few for a host of many engines."""
        loop = asyncio.get_running_loop()

        def begin_end() -> None:
            self._tasks.append(asyncio.create_task(self._end(process, reading)))

        def wait() -> None:
            process.wait()
            loop.call_soon_threadsafe(begin_end)

        threading.Thread(target=wait, name=f"wait-{self.engine_id}", daemon=True).start()

    async def _end(self, process: subprocess.Popen[bytes], reading: asyncio.Task[None]) -> None:
        # A worker that crashed leaves its engine core behind, which would keep the GPU and our pipe open.
        kill_process_tree(process.pid)
        self._close_life_line()
        await asyncio.wait([reading], timeout=LAST_WORDS_TIMEOUT_S)
        self.exit_code = process.returncode
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
            log.info("output of the engine", engine_id=self.engine_id, line=line.decode(errors="replace").rstrip())
            return
        self.state = status.state
        if status.state == EngineState.FAILED:
            self.failure = status
        self._on_change(self)

    def _close_life_line(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
