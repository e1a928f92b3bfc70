"""Detect a core that hangs: it has work but completes no step, or it loads but makes no progress.

Progress of steps is read from shared memory, so the core need not cooperate. These times do not count: loading and
compiling, having no work, times in which this process itself did not run (it was stopped, or starved together with the
core), and times in which the core was ready to run but other processes had the processors. So a core in an endless loop
is detected later if many processes share its processor.

Loading itself has no time limit, because models differ in size. Progress is observed from outside, because a core that
hangs cannot report it: a phase that the core enters, bytes read or written, more memory than ever before, a process
that it starts. CPU time does not count, or a core that waits in a busy loop would load for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
import psutil
import structlog

from ...processes.progress import Phase, Progress
from .client import CoreClient

CHECKS_PER_TIMEOUT = 10
MAX_INTERVAL_S = 0.5
MAX_OVERSLEEP_S = 1.0
_PATIENT_PHASES = frozenset({Phase.STARTING, Phase.COMPILING})

log = structlog.get_logger()
LOAD_CHECKS_PER_TIMEOUT = 20
MAX_LOAD_INTERVAL_S = 2.0

# A library that polls moves less.
MIN_MOVED_BYTES = 1 << 20


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


class Activity(msgspec.Struct, frozen=True):
    """Observation of a core and its descendants at one time.

    Args:
        entered_ns: when the core entered the phase that it reports.
        num_bytes: bytes read and written so far.
        rss_bytes: resident memory of all processes.
        pids: ids of all processes.
    """

    entered_ns: int = 0
    num_bytes: int = 0
    rss_bytes: int = 0
    pids: frozenset[int] = frozenset()


class LoadWatch:
    """Watch of one core until it is ready.

    Args:
        observe: returns the core's activity; None while the core does not exist.
        load_timeout_s: how long the core may make no progress; 0 without a limit.
    """

    def __init__(
        self,
        observe: Callable[[], Awaitable[Activity | None]],
        load_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observe = observe
        self._timeout_s = load_timeout_s
        self._interval_s = min(MAX_LOAD_INTERVAL_S, load_timeout_s / LOAD_CHECKS_PER_TIMEOUT)
        self._max_oversleep_s = min(MAX_OVERSLEEP_S, load_timeout_s / 2)
        self._clock = clock
        self._peak = Activity()
        self._checked_at = self._still_since = clock()

    async def run(self) -> str:
        """Watch until the core hangs, and return a sentence that says so."""
        if not self._timeout_s:
            await asyncio.Event().wait()
        self._checked_at = self._still_since = self._clock()
        while True:
            await asyncio.sleep(self._interval_s)
            finding = self.check(await self._observe())
            if finding is not None:
                return finding

    def check(self, activity: Activity | None) -> str | None:
        """Process an observation. Returns a sentence if the core hangs."""
        now = self._clock()
        overslept_s = now - self._checked_at - self._interval_s
        self._checked_at = now
        if activity is None or overslept_s > self._max_oversleep_s or self._has_moved(activity):
            self._still_since = now
        still_s = now - self._still_since
        if still_s < self._timeout_s:
            return None
        return (
            f"the engine core hung while it loaded: for {still_s:.1f} s (--load-timeout) it read and wrote nothing, "
            "took no memory and reported no progress"
        )

    def _has_moved(self, activity: Activity) -> bool:
        peak = self._peak
        has_moved = (
            activity.entered_ns != peak.entered_ns
            or activity.num_bytes >= peak.num_bytes + MIN_MOVED_BYTES
            or activity.rss_bytes >= peak.rss_bytes + MIN_MOVED_BYTES
            or not activity.pids <= peak.pids
        )
        if has_moved:
            # Compare with the maximum, because memory that goes up and down is no progress, nor is a process that ends.
            self._peak = Activity(
                activity.entered_ns,
                max(activity.num_bytes, peak.num_bytes),
                max(activity.rss_bytes, peak.rss_bytes),
                activity.pids | peak.pids,
            )
        return has_moved


async def until_hung(core: CoreClient, load_timeout_s: float) -> str:
    """Return a description of the hang once ``core`` has made no progress for ``load_timeout_s`` while loading."""

    async def observe_core() -> Activity | None:
        pid, entered_ns = core.pid, core.progress.read().phase_entered_ns
        return await asyncio.to_thread(core_activity, pid, entered_ns) if pid else None

    return await LoadWatch(observe_core, load_timeout_s).run()


def core_activity(pid: int, entered_ns: int) -> Activity:
    """Return the activity of the core ``pid`` and its descendants; processes that have exited are skipped.

    Args:
        entered_ns: when the core entered its phase, as the core reports.
    """
    pids: set[int] = set()
    num_bytes = rss_bytes = 0
    for process in _family(pid):
        try:
            with process.oneshot():
                rss_bytes += process.memory_info().rss
                num_bytes += _moved_bytes(process)
        except psutil.Error:
            continue
        pids.add(process.pid)
    return Activity(entered_ns, num_bytes, rss_bytes, frozenset(pids))


def _family(pid: int) -> list[psutil.Process]:
    try:
        core = psutil.Process(pid)
        return [core, *core.children(recursive=True)]
    except psutil.Error:
        return []


def _moved_bytes(process: psutil.Process) -> int:
    """Return the bytes read and written: by system calls, and by the kernel for memory that maps a file."""
    try:
        counters = process.io_counters()
    except (psutil.AccessDenied, AttributeError, NotImplementedError):  # another user's, or no counters on this host
        return 0
    called = getattr(counters, "read_chars", 0) + getattr(counters, "write_chars", 0)
    return called + counters.read_bytes + counters.write_bytes
