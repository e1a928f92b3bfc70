"""Detect a core that hangs: it has work, but completes no step.

Progress is read from shared memory, so the core need not cooperate. These times do not count: loading and compiling,
having no work, times in which this process itself did not run (it was stopped, or starved together with the core), and
times in which the core was ready to run but other processes had the processors. So a core in an endless loop is
detected later if many processes share its processor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from ...processes.progress import Phase, Progress

CHECKS_PER_TIMEOUT = 10
MAX_INTERVAL_S = 0.5
MAX_OVERSLEEP_S = 1.0
_PATIENT_PHASES = frozenset({Phase.STARTING, Phase.COMPILING})

log = structlog.get_logger()


class Readable(Protocol):
    """The part of a ``ProgressReader`` that the watch uses."""

    num_messages_sent: int

    def read(self) -> Progress: ...


class StallWatch:
    """Watch of one core. Every check except the first measures the time since the one before.

    Args:
        progress: progress of the core.
        stall_timeout_s: how long the core may have work without completing a step.
        waited_s: returns for how many seconds in total the core has waited for a processor.
    """

    def __init__(
        self,
        progress: Readable,
        stall_timeout_s: float,
        waited_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = progress
        self._waited_s = waited_s
        self._timeout_s = stall_timeout_s
        self._interval_s = min(MAX_INTERVAL_S, stall_timeout_s / CHECKS_PER_TIMEOUT)
        # A short timeout allows less oversleeping, or half of it spent asleep would look like a stall.
        self._max_oversleep_s = min(MAX_OVERSLEEP_S, stall_timeout_s / 2)
        self._clock = clock
        self._last_progress = Progress()
        self._checked_at = self._still_since = clock()
        # Time since ``_still_since`` that does not count, and the value of ``waited_s`` at the last check.
        self._starved_s = 0.0
        self._has_waited_s = 0.0

    @property
    def is_stalling(self) -> bool:
        """Whether half of the timeout has passed without a step; False again as soon as the core completes one."""
        return self._still_s >= self._timeout_s / 2

    async def run(self) -> str:
        """Watch until the core has stalled, and return a sentence that says so."""
        self._checked_at = self._still_since = self._clock()
        while True:
            await asyncio.sleep(self._interval_s)
            finding = self.check()
            if finding is not None:
                return finding

    def check(self) -> str | None:
        """Check the core once. Returns a sentence if the core has stalled."""
        now, progress, has_waited_s = self._clock(), self._progress.read(), self._waited_s()
        num_waiting = self._progress.num_messages_sent - progress.num_messages_taken
        has_work = progress.num_unfinished_reqs > 0 or num_waiting > 0
        overslept_s = now - self._checked_at - self._interval_s
        if overslept_s > self._max_oversleep_s:
            log.warning("worker_process_paused", gap_s=round(overslept_s, 1))
            self._restart_timeout(now)
        elif progress != self._last_progress or not has_work or progress.phase in _PATIENT_PHASES:
            self._restart_timeout(now)
        else:
            # The kernel counts a wait when it ends; the wait may have begun before the last step ended.
            starved_s = self._starved_s + max(0.0, has_waited_s - self._has_waited_s)
            self._starved_s = min(starved_s, now - self._still_since)
        self._last_progress, self._checked_at, self._has_waited_s = progress, now, has_waited_s
        if self._still_s < self._timeout_s:
            return None
        if progress.num_unfinished_reqs > 0:
            work = f"it held {_count(progress.num_unfinished_reqs, 'request')}"
        else:
            work = f"{_count(num_waiting, 'message')} waited for it"
        starved = f", {self._starved_s:.1f} s of waiting for a processor not counted" if self._starved_s >= 0.1 else ""
        return f"the engine core made no step for {self._still_s:.1f} s while {work}{starved}"

    def _restart_timeout(self, now: float) -> None:
        self._still_since, self._starved_s = now, 0.0

    @property
    def _still_s(self) -> float:
        return self._checked_at - self._still_since - self._starved_s


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
