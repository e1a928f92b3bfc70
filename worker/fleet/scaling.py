"""How many engines a fleet is to have. Pure: times are given, nothing is read.

    wanted = time that one engine needs for what waits / wanted wait
    target = wanted, rounded up, within [least, most]

So many engines would serve what waits in the wanted wait. Engines without a queue in front of them may be so
because they are just enough, so what runs keeps the engines that it fills to ``TARGET_USE``; it never adds one. Against
noise: a wish within a tenth of what is there is none; the fleet grows to the least that was wished for all of
``grow_after_s``, and shrinks to the most that was wished for all of ``shrink_after_s``. So it never shrinks sooner than
that after it has grown.

Source of the two windows and the tolerance: Kubernetes documentation, "Horizontal Pod Autoscaling", stabilization.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from ...shared.errors import ConfigurationError

# Share of their sequences or of their KV cache that engines are meant to use.
TARGET_USE = 0.8
TOLERANCE = 0.1
# Rounded up, one engine.
_SOMEBODY = 1e-6


class ScalingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator wants.

    Args:
        least, most: engines of the fleet; 0 at least lets it end them all while there is nothing to do.
        wanted_wait_s: how long what waits may take to be served, in seconds.
        grow_after_s, shrink_after_s: for how long more, or fewer, must have been wished without a break.

    Raises:
        ConfigurationError: the bounds contradict each other.
    """

    least: int
    most: int
    wanted_wait_s: float = 10.0
    grow_after_s: float = 3.0
    shrink_after_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.most < 1:
            raise ConfigurationError(f"engines must be LEAST:MOST with MOST at least 1, got {self.least}:{self.most}")
        if self.wanted_wait_s <= 0:
            raise ConfigurationError(f"wanted_wait must be above 0, got {self.wanted_wait_s:g}")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a model has to do, and who does it.

    Args:
        num_waiting: requests that may be handed out; 0 while the queue is paused.
        num_running: requests that engines have.
        backlog_s: time that one engine needs to serve what waits; None while nobody knows how fast one is.
        num_serving: engines that serve, this fleet's and others'.
        num_others: of these, the others'.
        busy: running work, in engines: 1.5 is an engine and a half.
    """

    num_waiting: int = 0
    num_running: int = 0
    backlog_s: float | None = None
    num_serving: int = 0
    num_others: int = 0
    busy: float = 0.0


def wished(load: Load, *, num_present: int, wanted_wait_s: float) -> float:
    """Return how many engines the load asks for, those of others included, not rounded.

    Args:
        num_present: engines of the fleet.
    """
    wish = min(load.busy / TARGET_USE, num_present + load.num_others)
    if load.num_waiting and load.backlog_s is not None:
        wish = max(wish, load.backlog_s / wanted_wait_s)
    # What waits wants somebody even where nobody knows how fast it would be served, and what runs keeps who runs it.
    return max(wish, _SOMEBODY) if load.num_waiting or load.num_running else wish


class Scaling:
    """The rule with its memory, for one fleet."""

    def __init__(self, options: ScalingOptions) -> None:
        self.options = options
        self._wishes: deque[tuple[float, int]] = deque()
        self._began_at: float | None = None

    def target(self, now_s: float, load: Load, num_present: int) -> int:
        """Return how many engines the fleet is to have from now on.

        Args:
            now_s: seconds on a clock that never goes back.
            num_present: engines of the fleet, those included that still start; not those that leave.
        """
        if self._began_at is None:
            self._began_at = now_s
        wish = self._wish(load, num_present)
        self._wishes.append((now_s, wish))
        self._forget(now_s)
        options = self.options
        bounded = min(max(num_present, options.least), options.most)
        # With no engine at all a request waits for its first, and nothing can flap.
        if num_present == 0 and wish:
            return max(bounded, wish)
        lowest = self._over(now_s, options.grow_after_s, min)
        if lowest is not None and lowest > bounded:
            return lowest
        highest = self._over(now_s, options.shrink_after_s, max)
        if highest is not None and highest < bounded:
            return highest
        return bounded

    def _wish(self, load: Load, num_present: int) -> int:
        wish = wished(load, num_present=num_present, wanted_wait_s=self.options.wanted_wait_s)
        own = wish - load.num_others if wish > load.num_others else 0.0
        is_near = num_present > 0 and abs(own / num_present - 1) <= TOLERANCE
        number = num_present if is_near else math.ceil(own - 1e-9)
        return min(max(number, self.options.least), self.options.most)

    def _over(self, now_s: float, window_s: float, choose: Callable[[Iterable[int]], int]) -> int | None:
        """The least or the most that was wished in the last ``window_s``; None before the fleet is so old.

        A wish holds until the next one, so the newest from before the window counts.
        """
        assert self._began_at is not None
        if now_s - self._began_at < window_s:
            return None
        since = [wish for at, wish in self._wishes if at > now_s - window_s]
        before = [wish for at, wish in self._wishes if at <= now_s - window_s]
        return choose(since + before[-1:])

    def _forget(self, now_s: float) -> None:
        longest_s = max(self.options.grow_after_s, self.options.shrink_after_s)
        while len(self._wishes) > 1 and self._wishes[1][0] <= now_s - longest_s:
            self._wishes.popleft()
