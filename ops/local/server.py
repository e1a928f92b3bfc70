"""A local `penstock gateway` or `penstock dashboard`, in its own process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ...shared.errors import ConfigurationError
from .life_line import LifeLine, unwind_on_sigterm
from .worker import failure

# Tests replace it, as that of ``worker.py``.
start_program = subprocess.Popen
STOP_TIMEOUT_S = 60.0


class LocalServer:
    """A command that serves, in a process; use it with ``with``, or call ``start`` and ``stop``.

    Args:
        name: name of the command.
        redis_url: URL of Redis.
        options: further options of the command.
        log_path: file of its log, shown if a start fails; a second start appends.
        port: 0 for a free port, a different one at each start.
    """

    def __init__(self, name: str, redis_url: str, options: Sequence[str], log_path: Path, *, port: int = 0) -> None:
        self._name = name
        self._command = [sys.executable, "-m", "penstock.ops.cli", name, "--redis-url", redis_url]
        self._command += ["--port", str(port), *options]
        self._log_path = log_path
        self._process: subprocess.Popen[str] | None = None
        self._life_line: LifeLine | None = None
        self.base_url = ""
        self.ready_time_s = 0.0

    @property
    def pid(self) -> int:
        """Process id; 0 if it does not run."""
        return self._process.pid if self._process is not None else 0

    @property
    def log(self) -> str:
        """The log so far, of all starts."""
        return self._log_path.read_text()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self._process is not None
        self._process.send_signal(number)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process and wait until it listens.

        Raises:
            ConfigurationError: the process ended; the message contains its log.
        """
        unwind_on_sigterm()
        started_at = time.monotonic()
        with self._log_path.open("a") as log:
            self._process = start_program(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        self._life_line = LifeLine(self._process.pid)
        assert self._process.stdout is not None
        # The last line that it prints. If its output ends before, the process has ended.
        line = next((line for line in self._process.stdout if line.startswith("ready: ")), "")
        if not line:
            self.stop()
            raise ConfigurationError(failure(f"the {self._name} did not start", self.log))
        self.base_url = line.removeprefix("ready: ").strip()
        self.ready_time_s = time.monotonic() - started_at

    def kill(self) -> None:
        """Kill the process with SIGKILL; ``start`` starts it again."""
        assert self._process is not None
        self._process.kill()
        self._reap()

    def stop(self) -> int:
        """Stop the process with SIGTERM and return its exit status; 0 if it does not run."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGTERM)
        return self.await_end()

    def await_end(self) -> int:
        """Wait until the process ends by itself or after a signal, and return its exit status. Kill it if it hangs."""
        assert self._process is not None
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        return self._reap()

    def _reap(self) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        status = self._process.wait()
        if self._life_line is not None:
            self._life_line.release()
        self._process.stdout.close()
        self._process = None
        return status


class LocalGateway(LocalServer):
    """A `penstock gateway`; ``base_url`` ends in /v1."""

    def __init__(self, redis_url: str, options: Sequence[str], log_path: Path, *, port: int = 0) -> None:
        super().__init__("gateway", redis_url, options, log_path, port=port)

    @property
    def root_url(self) -> str:
        """URL of the paths outside of /v1."""
        return self.base_url.removesuffix("/v1")
