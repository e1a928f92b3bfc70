"""Times of a stream (first token, between tokens), their percentiles, and how evenly tenants are served."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence


class StreamTimes:
    """Clock of one request's stream. Times in seconds."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._last: float | None = None
        self.ttft_s: float | None = None
        self.itl_s: list[float] = []
        self.num_tokens = 0

    def saw(self, num_tokens: int) -> None:
        """Record a delta of ``num_tokens`` tokens. Tokens that arrive together share the time since the last delta."""
        if not num_tokens:
            return
        now = time.perf_counter()
        if self._last is None:
            self.ttft_s = now - self._started
            num_gaps = num_tokens - 1
        else:
            num_gaps = num_tokens
        if num_gaps:
            since = now - (self._last if self._last is not None else now)
            self.itl_s += [since / num_gaps] * num_gaps
        self._last = now
        self.num_tokens += num_tokens


def percentile(values: Iterable[float], share: float) -> float:
    """Return the nearest-rank percentile, ``share`` in [0, 1]; NaN without values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def jain_index(values: Sequence[float]) -> float:
    """Return Jain's index of fairness (Jain et al., 1984): 1 if all values are equal, 1/n if one value has all.

    NaN for fewer than two values, or if all are 0.
    """
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if len(values) > 1 and squares else math.nan
