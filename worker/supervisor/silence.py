"""Finds worker processes that live but say nothing: stopped, or hung.

A worker process writes a line every ``STATUS_INTERVAL_S``, loading included. It is taken for dead when the line is
overdue by ``stall_timeout_s``. Time in which the supervisor itself did not run does not count: the lines of that time
wait in the pipe, unread. Nor does time in which the worker process was ready to run, and others had the processors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from ..config.worker_config import STATUS_INTERVAL_S, WorkerConfig
from .engine_process import EngineProcess

MAX_INTERVAL_S = 0.25
MAX_OVERSLEEP_S = 1.0
# For the interpreter and its imports, before which nothing can be said. A host that starts many engines takes long.
FIRST_LINE_TIMEOUT_S = 60.0

log = structlog.get_logger()


class SilenceWatch:
    """Kills worker processes that fell silent.

    Args:
        config: for the timeout.
        lives: returns the processes that ought to speak.
    """

    def __init__(self, config: WorkerConfig, lives: Callable[[], Iterable[EngineProcess]]) -> None:
        self._timeout_s = STATUS_INTERVAL_S + config.stall_timeout_s
        self._interval_s = min(MAX_INTERVAL_S, config.stall_timeout_s / 4)
        # A short timeout forgives less, or half of it spent asleep would look like silence.
        self._max_oversleep_s = min(MAX_OVERSLEEP_S, config.stall_timeout_s / 2)
        self._lives = lives

    async def run(self) -> None:
        """Watch until cancelled."""
        clock = asyncio.get_running_loop().time
        awake_since = looked_at = clock()
        while True:
            await asyncio.sleep(self._interval_s)
            now = clock()
            if now - looked_at > self._interval_s + self._max_oversleep_s:
                log.warning("supervisor_paused", gap_s=round(now - looked_at, 1))
                awake_since = now
            looked_at = now
            self.look(now, awake_since)

    def look(self, now: float, awake_since: float) -> None:
        """Kill whoever was silent for too long, all times by the loop's clock."""
        for life in self._lives():
            silence_s = now - max(life.heard_at, awake_since)
            timeout_s = self._timeout_s if life.has_spoken else max(self._timeout_s, FIRST_LINE_TIMEOUT_S)
            if silence_s > timeout_s and silence_s - life.starved_s() > timeout_s:
                life.end_silence(now - life.heard_at)
