"""The swaps of a device: counts, the last one, and their share of the time."""

from __future__ import annotations

import time
from collections import deque

from ...shared.messages.devices import SwapCount, SwapRecord
from ...shared.swap.rule import Swap

SHARE_OF_S = 600.0


class SwapLog:
    """Swaps since the supervisor started.

    Attributes:
        last: the last one; None before the first.
    """

    def __init__(self) -> None:
        self.last: SwapRecord | None = None
        self._counts: dict[tuple[str, str, str], int] = {}
        self._recent: deque[tuple[float, float]] = deque()

    def add_swap(self, swap: Swap, took_s: float, num_handed_back: int, now_s: float) -> None:
        """Record a swap that has just ended."""
        left = left_by(swap)
        self.last = SwapRecord(
            at=time.time(),
            left=left,
            entered=swap.entering or "",
            reason=swap.reason,
            took_s=round(took_s, 3),
            num_handed_back=num_handed_back,
        )
        key = (left[0] if left else "", swap.entering or "", swap.reason.value)
        self._counts[key] = self._counts.get(key, 0) + 1
        if swap.entering is not None:
            self._recent.append((now_s - took_s, now_s))

    @property
    def counts(self) -> list[SwapCount]:
        """Numbers of swaps; one of several models that leave counts for the first of them."""
        return [SwapCount(left=left, entered=to, reason=why, count=n) for (left, to, why), n in self._counts.items()]

    def share(self, now_s: float, since_s: float) -> float:
        """Return the share of the last ten minutes that swaps took; of the time since ``since_s`` if that is less."""
        begin_s = max(now_s - SHARE_OF_S, since_s)
        while self._recent and self._recent[0][1] < begin_s:
            self._recent.popleft()
        swap_s = sum(end - max(start, begin_s) for start, end in self._recent)
        return swap_s / (now_s - begin_s) if now_s > begin_s else 0.0


def left_by(swap: Swap) -> list[str]:
    """Return the models that leave in a swap, each once."""
    return [*dict.fromkeys(swap.asleep + swap.ended)]
