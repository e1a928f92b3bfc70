"""Finds a core that hangs: it has work, and makes no step.

Read from shared memory, so nothing depends on the core's goodwill. Not a stall: loading and compiling, having nothing
to do, time in which this process itself did not run (it was stopped, or starved with the core beside it), and time in
which the core was ready to run but others had the processors. A core that turns in a loop where many share a processor
is found later by that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from ...progress import Phase, Progress

LOOKS_PER_TIMEOUT = 10
MAX_INTERVAL_S = 0.5
MAX_OVERSLEEP_S = 1.0
_PATIENT_PHASES = frozenset({Phase.STARTING, Phase.COMPILING})

log = structlog.get_logger()


class Readable(Protocol):
    """What the watch needs of a ``ProgressReader``."""

    num_messages_sent: int

    def read(self) -> Progress: ...


class StallWatch:
    """Watches one core; every look but the first counts from the one before.

    Args:
        progress: of the core.
        stall_timeout_s: how long the core may have work and make no step.
        waited_s: says how long it has waited for a processor so far.
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
        self._interval_s = min(MAX_INTERVAL_S, stall_timeout_s / LOOKS_PER_TIMEOUT)
        # A short timeout forgives less, or half of it spent asleep would look like a stall.
        self._max_oversleep_s = min(MAX_OVERSLEEP_S, stall_timeout_s / 2)
        self._clock = clock
        self._seen = Progress()
        self._looked_at = self._still_since = clock()
        # Of the time since ``_still_since`` what does not count, and what ``waited_s`` said at the last look.
        self._starved_s = 0.0
        self._has_waited_s = 0.0

    @property
    def is_stalling(self) -> bool:
        """Whether half of the timeout has passed without a step; over again as soon as the core moves."""
        return self._still_s >= self._timeout_s / 2

    async def run(self) -> str:
        """Look on until the core has stalled, and say so in a sentence."""
        self._looked_at = self._still_since = self._clock()
        while True:
            await asyncio.sleep(self._interval_s)
            cause = self.look()
            if cause is not None:
                return cause

    def look(self) -> str | None:
        """Take one look; returns the cause if the core has stalled."""
        now, seen, has_waited_s = self._clock(), self._progress.read(), self._waited_s()
        num_waiting = self._progress.num_messages_sent - seen.num_messages_taken
        has_work = seen.num_unfinished_reqs > 0 or num_waiting > 0
        overslept_s = now - self._looked_at - self._interval_s
        if overslept_s > self._max_oversleep_s:
            log.warning("worker_process_paused", gap_s=round(overslept_s, 1))
            self._begin(now)
        elif seen != self._seen or not has_work or seen.phase in _PATIENT_PHASES:
            self._begin(now)
        else:
            # The kernel counts a wait when it is over, which may have begun before the last step ended.
            starved_s = self._starved_s + max(0.0, has_waited_s - self._has_waited_s)
            self._starved_s = min(starved_s, now - self._still_since)
        self._seen, self._looked_at, self._has_waited_s = seen, now, has_waited_s
        if self._still_s < self._timeout_s:
            return None
        if seen.num_unfinished_reqs > 0:
            held = f"it held {_count(seen.num_unfinished_reqs, 'request')}"
        else:
            held = f"{_count(num_waiting, 'message')} waited for it"
        starved = f", {self._starved_s:.1f} s of waiting for a processor not counted" if self._starved_s >= 0.1 else ""
        return f"the engine core made no step for {self._still_s:.1f} s while {held}{starved}"

    def _begin(self, now: float) -> None:
        self._still_since, self._starved_s = now, 0.0

    @property
    def _still_s(self) -> float:
        return self._looked_at - self._still_since - self._starved_s


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
