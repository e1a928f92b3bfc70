"""When the next thing happens: after some time, or after some tokens."""

from __future__ import annotations

import asyncio
import math
from random import Random
from typing import Protocol


class Pace(Protocol):
    """Draws how long to wait, exponentially distributed, and waits."""

    async def wait(self, random: Random) -> None: ...


class EveryFewSeconds:
    """After ``mean_s`` seconds on average."""

    def __init__(self, mean_s: float) -> None:
        self._mean_s = mean_s

    async def wait(self, random: Random) -> None:
        await asyncio.sleep(random.expovariate(1 / self._mean_s))


class EveryFewTokens:
    """Pace of one event per ``mean`` tokens of all requests on average, independent of the speed of the machine.

    While no tokens are generated, because everything has died, no event happens.
    """

    def __init__(self, mean: int) -> None:
        self._mean = mean
        self._left = math.inf
        self._is_over = asyncio.Event()

    def saw(self, num_tokens: int) -> None:
        """Count tokens that subscribers received."""
        self._left -= num_tokens
        if self._left <= 0:
            self._is_over.set()

    async def wait(self, random: Random) -> None:
        self._left = random.expovariate(1 / self._mean)
        self._is_over.clear()
        await self._is_over.wait()
