"""Kills worker processes that are alive but report nothing, because they are stopped or hang.

A worker process writes a line every ``STATUS_INTERVAL_S``, also while it loads. It counts as dead when the line is
overdue by ``stall_timeout_s``. Two spans do not count: the time in which the supervisor itself did not run, because the
lines of that time are unread in the pipe; and the time in which the worker process was runnable without a processor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from ..config.worker_config import STATUS_INTERVAL_S, WorkerConfig
from .engine_process import EngineProcess

MAX_INTERVAL_S = 0.25
MAX_OVERSLEEP_S = 1.0
# Covers the start of the interpreter and its imports, which are slow on a host that starts many engines.
FIRST_REPORT_TIMEOUT_S = 60.0

log = structlog.get_logger()


class SilenceWatch:
    """Watch over worker processes that must report.

    Args:
        config: gives the timeout.
        processes: returns the processes that are expected to report.
    """

    def __init__(self, config: WorkerConfig, processes: Callable[[], Iterable[EngineProcess]]) -> None:
        self._timeout_s = STATUS_INTERVAL_S + config.stall_timeout_s
        self._interval_s = min(MAX_INTERVAL_S, config.stall_timeout_s / 4)
        # Bounded by half of a short timeout, or that much time asleep would look like silence.
        self._max_oversleep_s = min(MAX_OVERSLEEP_S, config.stall_timeout_s / 2)
        self._processes = processes

    async def run(self) -> None:
        """Watch until cancelled."""
        clock = asyncio.get_running_loop().time
        awake_since = checked_at = clock()
        while True:
            await asyncio.sleep(self._interval_s)
            now = clock()
            if now - checked_at > self._interval_s + self._max_oversleep_s:
                log.warning("supervisor_paused", gap_s=round(now - checked_at, 1))
                awake_since = now
            checked_at = now
            self.check(now, awake_since)

    def check(self, now: float, awake_since: float) -> None:
        """Kill processes whose last report is too old. Both times are of the loop's clock, in seconds."""
        for process in self._processes():
            silence_s = now - max(process.last_report_at, awake_since)
            timeout_s = self._timeout_s if process.has_reported else max(self._timeout_s, FIRST_REPORT_TIMEOUT_S)
            if silence_s > timeout_s and silence_s - process.starved_s() > timeout_s:
                process.kill_for_silence(now - process.last_report_at)
