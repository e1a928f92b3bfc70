"""A whole deployment of one's own for as long as a ``with`` block lasts: a private Redis and `worker start`."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

from ..shared.embedded import EmbeddedRedis
from ..shared.errors import ConfigurationError

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0


class LocalStack:
    """Starts Redis and one `worker start` in processes of their own and waits until the model is served.

    Args:
        model: folder or hub name.
        worker_options: further options of `worker start`.
        log_path: where the worker's log goes; a temporary file when None, shown if the start fails.

    Raises:
        ConfigurationError: the worker ended, or was not ready in time; the message has its own words.
    """

    def __init__(self, model: str | Path, worker_options: Sequence[str] = (), log_path: Path | None = None) -> None:
        self._model = str(model)
        self._worker_options = list(worker_options)
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-")
        self._log_path = log_path or Path(self._folder.name) / "worker.log"
        self._worker: subprocess.Popen[str] | None = None
        self._redis: EmbeddedRedis | None = None
        self.ready_time_s = 0.0

    @property
    def url(self) -> str:
        """Where the private Redis listens."""
        assert self._redis is not None
        return self._redis.url

    def __enter__(self) -> LocalStack:
        try:
            self._redis = EmbeddedRedis.start(Path(self._folder.name) / "data")
            self.start_worker()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def processes(self) -> dict[str, psutil.Process]:
        """The worker side's processes by role: supervisor, worker, engine core (numbered if several)."""
        assert self._worker is not None
        supervisor = psutil.Process(self._worker.pid)
        found = {"supervisor": supervisor}
        for i, worker in enumerate(supervisor.children()):
            found[f"worker {i}"] = worker
            found |= {f"engine core {i}": core for core in worker.children()}
        return found

    def stop(self) -> None:
        """Stop everything this stack started; twice does nothing."""
        self.stop_worker()
        if self._redis is not None:
            self._redis.close()
            self._redis = None
        self._folder.cleanup()

    def stop_worker(self) -> None:
        """Stop the worker alone, in order, and wait for its end; requests stay in Redis."""
        if self._worker is None:
            return
        if self._worker.poll() is None:
            family = [self._worker.pid, *(p.pid for p in psutil.Process(self._worker.pid).children(recursive=True))]
            self._worker.send_signal(signal.SIGTERM)
            try:
                self._worker.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                for pid in family:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self._worker.wait()
        assert self._worker.stdout is not None
        self._reading.join()
        self._worker.stdout.close()
        self._worker = None

    def start_worker(self) -> None:
        """Start the worker and wait until it serves.

        Raises:
            ConfigurationError: as the class.
        """
        command = [sys.executable, "-m", "penstock.worker.cli", "start", "--model", self._model]
        command += ["--redis-url", self.url, *self._worker_options]
        started = time.monotonic()
        with self._log_path.open("a") as log:
            # A session of its own: Ctrl-C comes to us alone, and we stop the worker in order.
            self._worker = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        self._await_ready()
        self.ready_time_s = time.monotonic() - started

    def _await_ready(self) -> None:
        assert self._worker is not None
        assert self._worker.stdout is not None
        lines: queue.Queue[str] = queue.Queue()

        def read(stream=self._worker.stdout) -> None:
            for line in stream:
                lines.put(line)
            lines.put("")

        self._reading = threading.Thread(target=read, daemon=True)
        self._reading.start()
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ConfigurationError(f"the worker was not ready within {READY_TIMEOUT_S:g} s") from None
            if line.startswith("ready"):
                return
            if not line:
                raise ConfigurationError(f"the worker did not start:\n{self._log_path.read_text().strip()}")
