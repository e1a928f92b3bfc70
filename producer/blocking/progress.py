"""A progress bar on standard error, written here so that the client needs no library for it."""

from __future__ import annotations

import sys
import time
from types import TracebackType

WIDTH = 30
REDRAW_S = 0.1


class ProgressBar:
    """Counts finished requests and their tokens. Draws only on a terminal."""

    def __init__(self, total: int, *, shown: bool = True) -> None:
        self._total = total
        self._shown = shown and total > 0 and sys.stderr.isatty()
        self._done = 0
        self._tokens = 0
        self._started = time.monotonic()
        self._drawn = 0.0

    def advance(self, num_tokens: int) -> None:
        """Count one more finished request and its output tokens."""
        self._done += 1
        self._tokens += num_tokens
        now = time.monotonic()
        if self._shown and (now - self._drawn > REDRAW_S or self._done == self._total):
            self._drawn = now
            self._draw(now - self._started)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown and self._done:
            sys.stderr.write("\n")

    def _draw(self, elapsed_s: float) -> None:
        filled = WIDTH * self._done // self._total
        rate = self._tokens / elapsed_s if elapsed_s else 0.0
        bar = "█" * filled + "·" * (WIDTH - filled)
        sys.stderr.write(f"\r{bar} {self._done}/{self._total} requests, {rate:,.0f} tokens/s ")
        sys.stderr.flush()
