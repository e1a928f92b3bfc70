"""The server that ``--engine-command`` starts, as its core sees it."""

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
    """Started by a keeper, which ends it with this process.

    Args:
        words: the command.
    """

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "penstock.worker.other_engines.http.keeper", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._is_wanted = True
        self._asking = threading.Lock()
        self._found: str | None = None
        log.info("engine_server_started", command=words, keeper_pid=self._keeper.pid)

    def ended(self) -> str | None:
        """How it has ended, with its last words; None while it runs."""
        return None if self._keeper.poll() is None else self._finding()

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call ``on_lost`` with how it ended, in a thread, if it does so before ``close``."""

        def wait() -> None:
            finding = self._finding()
            if self._is_wanted:
                on_lost(finding)

        threading.Thread(target=wait, name="launched-server", daemon=True).start()

    def close(self) -> None:
        """End it, and wait until it is gone."""
        self._is_wanted = False
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._finding()

    def _finding(self) -> str:
        """Wait for its end; the same for all who ask."""
        with self._asking:
            if self._found is None:
                assert self._keeper.stdout is not None
                assert self._keeper.stdin is not None
                told = self._keeper.stdout.read()
                self._keeper.wait()
                self._keeper.stdout.close()
                self._keeper.stdin.close()
                self._found = self._told(told)
            return self._found

    def _told(self, told: bytes) -> str:
        name = self._words[0]
        try:
            report = msgspec.json.decode(told, type=Report)
        except msgspec.MsgspecError:
            return f"{name} was killed"
        last_words = " | ".join(line for line in report.last_words if line) or "none"
        if report.returncode is None:
            return f"{name} cannot be started: {last_words}"
        how = f"by signal {-report.returncode}" if report.returncode < 0 else f"with status {report.returncode}"
        return f"{name} ended {how}; its last words: {last_words}"
