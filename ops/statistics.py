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
        """A delta of so many tokens came now. Tokens that come together share the time since the last ones."""
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
    """The nearest-rank percentile, ``share`` in [0, 1]; NaN without values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def jain_index(values: Sequence[float]) -> float:
    """1 where all are equal, 1/n where one has all (Jain et al., 1984); NaN for fewer than two, or if all are 0."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if len(values) > 1 and squares else math.nan
