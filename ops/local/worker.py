"""A `worker start` of one's own, in processes of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from ...shared.errors import ConfigurationError
from .life_line import LifeLine, unwind_on_sigterm

# Of the supervisor; tests have it forked from a process that has its imports.
start_program = subprocess.Popen
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0


class LocalWorker:
    """Starts and stops `worker start`.

    Args:
        model: folder or hub name.
        redis_url: where the broker is.
        options: further options of `worker start`.
        log_path: where its log goes, shown if a start fails; a second start appends.
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
        """Process id of its supervisor; 0 before it was started."""
        return self._process.pid if self._process is not None else 0

    @property
    def log(self) -> str:
        """What it has logged so far, all starts."""
        return self._log_path.read_text()

    def spawn(self) -> None:
        """Start it without waiting until it serves."""
        unwind_on_sigterm()
        with self._log_path.open("a") as log:
            # A session of its own: Ctrl-C comes to us alone, and we stop the worker in order.
            self._process = start_program(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        self._life_line = LifeLine(self._process.pid)
        self._spawned_at = time.monotonic()
        self._lines: queue.Queue[str] = queue.Queue()
        self._reading = threading.Thread(target=self._read, args=(self._process, self._lines), daemon=True)
        self._reading.start()

    def await_ready(self) -> None:
        """Wait until all its engines serve.

        Raises:
            ConfigurationError: it ended, or was not ready in time; the message has its own words.
        """
        deadline = self._spawned_at + READY_TIMEOUT_S
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ConfigurationError(f"the worker was not ready within {READY_TIMEOUT_S:g} s") from None
            if line.startswith("ready"):
                self.ready_time_s = time.monotonic() - self._spawned_at
                return
            if not line:
                raise ConfigurationError(f"the worker did not start:\n{self.log.strip()}")

    @property
    def is_running(self) -> bool:
        """Whether its supervisor lives."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Stop it in order, and by force if that takes too long; twice does nothing."""
        if self._process is None:
            return
        if self._process.poll() is None:
            family = [self._process.pid, *(p.pid for p in psutil.Process(self._process.pid).children(recursive=True))]
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                for pid in family:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        self.await_end()

    def await_end(self) -> int:
        """Wait until it has ended by itself, or by somebody's signal, so that it can be started again; returns its exit
        status."""
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
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")
