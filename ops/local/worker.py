"""A local `worker start`, in its own processes."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from ...shared.errors import ConfigurationError
from .life_line import LifeLine, unwind_on_sigterm

# Starts the supervisor. Tests replace it to fork from a process that has its imports.
start_program = subprocess.Popen
STOP_TIMEOUT_S = 60.0
_POLL_S = 0.25


class LocalWorker:
    """A `worker start` that can be stopped and started again.

    Args:
        model: folder or hub name.
        redis_url: URL of Redis.
        options: further options of `worker start`.
        log_path: file of its log, shown if a start fails; a second start appends.
    """

    def __init__(self, model: str, redis_url: str, options: Sequence[str], log_path: Path) -> None:
        self._command = [sys.executable, "-m", "penstock.worker.cli", "start", "--model", model]
        self._command += ["--redis-url", redis_url, *options]
        self._log_path = log_path
        self._process: subprocess.Popen[str] | None = None
        self._reading: threading.Thread | None = None
        self._life_line: LifeLine | None = None
        self.ready_time_s = 0.0

    @property
    def pid(self) -> int:
        """Process id of the supervisor; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    @property
    def log(self) -> str:
        """The log so far, of all starts."""
        return self._log_path.read_text()

    def spawn(self) -> None:
        """Start the worker without waiting until it serves."""
        unwind_on_sigterm()
        with self._log_path.open("a") as log:
            # In its own session, so that Ctrl-C reaches only this process, which stops the worker with SIGTERM.
            self._process = start_program(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        self._life_line = LifeLine(self._process.pid)
        self._spawned_at = time.monotonic()
        self._lines: queue.Queue[str] = queue.Queue()
        self._reading = threading.Thread(target=self._read_lines, args=(self._process, self._lines), daemon=True)
        self._reading.start()

    def await_ready(self, while_waiting: Callable[[str], None] | None = None) -> None:
        """Wait until all engines of the worker serve.

        Args:
            while_waiting: is called with the log so far, a few times a second.

        Raises:
            ConfigurationError: the worker ended, as it does if it does not load; the message contains its log.
        """
        while True:
            if while_waiting is not None:
                while_waiting(self.log)
            try:
                line = self._lines.get(timeout=None if while_waiting is None else _POLL_S)
            except queue.Empty:
                continue
            if line.startswith("ready"):
                self.ready_time_s = time.monotonic() - self._spawned_at
                return
            if not line:
                raise ConfigurationError(failure("the worker did not start", self.log))

    @property
    def is_running(self) -> bool:
        """Whether the supervisor runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Stop the worker with SIGTERM, and kill it if that takes too long. A second call does nothing."""
        if self._process is None:
            return
        if self._process.poll() is None:
            family = [self._process.pid]
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends at this moment
                family += [child.pid for child in psutil.Process(self._process.pid).children(recursive=True)]
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                for pid in family:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        self.await_end()

    def await_end(self) -> int:
        """Wait until the worker has ended, by itself or by a signal, and return its exit status. It can start again."""
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._reading is not None
        status = self._process.wait()
        if self._life_line is not None:
            self._life_line.release()
        self._reading.join()
        self._process.stdout.close()
        self._process = None
        return status

    @staticmethod
    def _read_lines(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")


def failure(subject: str, log: str) -> str:
    """Return the message for a process that ended by itself: the last line of its log, then the lines before."""
    *rest, last = log.strip().splitlines() or ["it wrote no log"]
    return "\n".join((f"{subject}: {last.removeprefix('error: ')}", *rest))
