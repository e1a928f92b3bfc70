"""Finds a core that hangs while it loads: for so long nothing at all has moved.

A large model takes as long as it takes. What counts as progress is seen from outside: a stage that the core reports,
bytes read or written, more memory than ever before, a process that it starts. Time on the processor does not count, or
a core that waits in a loop would load for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

LOOKS_PER_TIMEOUT = 20
MAX_INTERVAL_S = 2.0
MAX_OVERSLEEP_S = 1.0
# Less is a library that polls.
MIN_MOVED_BYTES = 1 << 20


class Activity(msgspec.Struct, frozen=True):
    """One look at a core and what it has started.

    Args:
        entered_ns: when the stage began that the core reports.
        num_bytes: read and written so far.
        rss_bytes: memory that they hold.
        pids: who they are.
    """

    entered_ns: int = 0
    num_bytes: int = 0
    rss_bytes: int = 0
    pids: frozenset[int] = frozenset()


class LoadWatch:
    """Watches one core until it is ready.

    Args:
        see: takes a look at the core; None while there is none.
        load_timeout_s: how long nothing may move; 0 lets it load for ever.
    """

    def __init__(
        self,
        see: Callable[[], Awaitable[Activity | None]],
        load_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._see = see
        self._timeout_s = load_timeout_s
        self._interval_s = min(MAX_INTERVAL_S, load_timeout_s / LOOKS_PER_TIMEOUT)
        self._max_oversleep_s = min(MAX_OVERSLEEP_S, load_timeout_s / 2)
        self._clock = clock
        self._counted = Activity()
        self._looked_at = self._still_since = clock()

    async def run(self) -> str:
        """Look on until the core hangs, and say so in a sentence."""
        if not self._timeout_s:
            await asyncio.Event().wait()
        self._looked_at = self._still_since = self._clock()
        while True:
            await asyncio.sleep(self._interval_s)
            finding = self.look(await self._see())
            if finding is not None:
                return finding

    def look(self, seen: Activity | None) -> str | None:
        """Count what was seen; returns the finding if the core hangs."""
        now = self._clock()
        overslept_s = now - self._looked_at - self._interval_s
        self._looked_at = now
        if seen is None or overslept_s > self._max_oversleep_s or self._has_moved(seen):
            self._still_since = now
        still_s = now - self._still_since
        if still_s < self._timeout_s:
            return None
        return (
            f"the engine core hung while it loaded: for {still_s:.1f} s (--load-timeout) it read and wrote nothing, "
            "took no memory and reported no progress"
        )

    def _has_moved(self, seen: Activity) -> bool:
        counted = self._counted
        has_moved = (
            seen.entered_ns != counted.entered_ns
            or seen.num_bytes >= counted.num_bytes + MIN_MOVED_BYTES
            or seen.rss_bytes >= counted.rss_bytes + MIN_MOVED_BYTES
            or not seen.pids <= counted.pids
        )
        if has_moved:
            # The most of each: memory that goes up and down is no progress, nor is a process that ends.
            self._counted = Activity(
                seen.entered_ns,
                max(seen.num_bytes, counted.num_bytes),
                max(seen.rss_bytes, counted.rss_bytes),
                seen.pids | counted.pids,
            )
        return has_moved
