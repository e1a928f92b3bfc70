"""The server that ``--engine-command`` starts, from the side of its core."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec
import structlog

from .keeper import Report

log = structlog.get_logger(__name__)


class LaunchedServer:
    """Server started by a keeper process, which ends it together with this process.

    Args:
        words: words of the command.
    """

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "penstock.worker.other_engines.http.keeper", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._is_open = True
        self._lock = threading.Lock()
        self._exit_description: str | None = None
        log.info("engine_server_started", command=words, keeper_pid=self._keeper.pid)

    def ended(self) -> str | None:
        """Return how the server has ended, with its last lines; None while it runs."""
        return None if self._keeper.poll() is None else self._wait()

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call ``on_lost`` with how the server ended, in a thread, if it ends before ``close``."""

        def wait() -> None:
            description = self._wait()
            if self._is_open:
                on_lost(description)

        threading.Thread(target=wait, name="launched-server", daemon=True).start()

    def close(self) -> None:
        """End the server, and wait until it has exited."""
        self._is_open = False
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._wait()

    def _wait(self) -> str:
        """Wait for the exit of the server and describe it. May be called from several threads."""
        with self._lock:
            if self._exit_description is None:
                assert self._keeper.stdout is not None
                assert self._keeper.stdin is not None
                report = self._keeper.stdout.read()
                self._keeper.wait()
                self._keeper.stdout.close()
                self._keeper.stdin.close()
                self._exit_description = self._describe(report)
            return self._exit_description

    def _describe(self, encoded_report: bytes) -> str:
        name = self._words[0]
        try:
            report = msgspec.json.decode(encoded_report, type=Report)
        except msgspec.MsgspecError:
            return f"{name} was killed"
        last_words = " | ".join(line for line in report.last_words if line) or "none"
        if report.returncode is None:
            return f"{name} cannot be started: {last_words}"
        how = f"by signal {-report.returncode}" if report.returncode < 0 else f"with status {report.returncode}"
        return f"{name} ended {how}; its last words: {last_words}"
