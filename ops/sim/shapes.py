"""Arrivals and lengths of the requests of a group of tenants.

Rates are requests per second of the whole group, lengths are tokens. ``shape`` names the kind of a table.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from random import Random

import msgspec

from ...shared.errors import ValidationError
from ...shared.values.shown import shown


def check_at_least(name: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        raise ValidationError(f"{name} must be a number from {least:g} on, got {shown(value)}")


class _Table(msgspec.Struct, frozen=True, kw_only=True, tag_field="shape", forbid_unknown_fields=True):
    """Base class of tables with a ``shape``."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_at_least(name, getattr(self, name), 0)

    def fixed_times(self, until_s: float) -> Iterator[float]:
        """Yield the arrival times that are not random."""
        return iter(())


class Constant(_Table, frozen=True, kw_only=True, tag="constant"):
    """Requests at random moments, ``per_s`` on the average (a Poisson process)."""

    per_s: float

    @property
    def most_per_s(self) -> float:
        return self.per_s

    def rate(self, at_s: float) -> float:
        """Return the requests per second at a time of the simulation."""
        return self.per_s


class Burst(_Table, frozen=True, kw_only=True, tag="burst"):
    """``per_s``, but ``burst_per_s`` for ``for_s`` seconds from ``at_s`` on."""

    burst_per_s: float
    at_s: float
    for_s: float
    per_s: float = 0.0

    @property
    def most_per_s(self) -> float:
        return max(self.per_s, self.burst_per_s)

    def rate(self, at_s: float) -> float:
        """Return the requests per second at a time of the simulation."""
        return self.burst_per_s if self.at_s <= at_s < self.at_s + self.for_s else self.per_s


class Day(_Table, frozen=True, kw_only=True, tag="day"):
    """A sine from ``low_per_s`` at the start to ``high_per_s`` half a period later and back."""

    low_per_s: float
    high_per_s: float
    period_s: float = 86400.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low_per_s <= self.high_per_s:
            raise ValidationError(f"low_per_s must be at most high_per_s, got {self.low_per_s:g}")
        check_at_least("period_s", self.period_s, 0.001)

    @property
    def most_per_s(self) -> float:
        return self.high_per_s

    def rate(self, at_s: float) -> float:
        """Return the requests per second at a time of the simulation."""
        height = (1 - math.cos(2 * math.pi * at_s / self.period_s)) / 2
        return self.low_per_s + (self.high_per_s - self.low_per_s) * height


class Crowds(_Table, frozen=True, kw_only=True, tag="crowds"):
    """``per_s``, and ``number`` requests at the same time every ``every_s`` seconds, the first at ``from_s``."""

    number: int
    every_s: float
    from_s: float = 0.0
    per_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("every_s", self.every_s, 0.001)

    @property
    def most_per_s(self) -> float:
        return self.per_s

    def rate(self, at_s: float) -> float:
        """Return the random requests per second at a time of the simulation."""
        return self.per_s

    def fixed_times(self, until_s: float) -> Iterator[float]:
        """Yield the arrival times of the crowds."""
        for turn in range(max(0, math.ceil((until_s - self.from_s) / self.every_s))):
            yield from [self.from_s + turn * self.every_s] * self.number


Arrivals = Constant | Burst | Day | Crowds


def divided(arrivals: Arrivals, number: int) -> Arrivals:
    """Return one of ``number`` equal parts of arrivals. Each part has whole crowds."""
    rates = {name: getattr(arrivals, name) / number for name in arrivals.__struct_fields__ if name.endswith("per_s")}
    return msgspec.structs.replace(arrivals, **rates)


def arrival_times(arrivals: Arrivals, random: Random, until_s: float) -> Iterator[float]:
    """Yield the arrival times of requests in order."""
    return heapq.merge(_random_times(arrivals, random, until_s), arrivals.fixed_times(until_s))


def _random_times(arrivals: Arrivals, random: Random, until_s: float) -> Iterator[float]:
    """Yield random times by thinning (Lewis and Shedler, 1979)."""
    at_s, max_rate = 0.0, arrivals.most_per_s
    while max_rate > 0:
        at_s += random.expovariate(max_rate)
        if at_s >= until_s:
            return
        if random.random() * max_rate < arrivals.rate(at_s):
            yield at_s


class Fixed(_Table, frozen=True, kw_only=True, tag="fixed"):
    """Always ``tokens``."""

    tokens: int

    @property
    def most(self) -> int:
        return self.tokens

    def draw(self, random: Random) -> int:
        """Return a length in tokens, at least 1."""
        return max(1, self.tokens)


class Uniform(_Table, frozen=True, kw_only=True, tag="uniform"):
    """Uniformly distributed from ``least`` to ``most``."""

    least: int
    most: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.most:
            raise ValidationError(f"least must be at most {self.most}, which is most; got {self.least}")

    def draw(self, random: Random) -> int:
        """Return a length in tokens, at least 1."""
        return max(1, random.randint(self.least, self.most))


class Lognormal(_Table, frozen=True, kw_only=True, tag="lognormal"):
    """Half of them below ``median``, a few very long ones, none above ``most``. ``sigma`` is that of the logarithm."""

    median: float
    sigma: float
    most: int

    def draw(self, random: Random) -> int:
        """Return a length in tokens, at least 1."""
        return max(1, min(self.most, round(self.median * math.exp(random.gauss(0, self.sigma)))))


Lengths = Fixed | Uniform | Lognormal
