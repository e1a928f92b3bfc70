"""The number of engines that a fleet should have. Pure: times are arguments, and no I/O is done.

    demand = time that one engine needs for the queued requests / wanted wait
    target = demand, rounded up, within [least, most]

This many engines would serve the queue within the wanted wait. An empty queue may mean that the engines are just
enough, so running requests keep the engines that they fill to ``TARGET_USE``; they never add one.

Against noise, a demand within a tenth of the present number changes nothing. The fleet grows to the smallest demand
during ``grow_after_s``, and shrinks to the largest demand during ``shrink_after_s``. So it never shrinks sooner than
``shrink_after_s`` after it has grown.

Source of the two windows and the tolerance: Kubernetes documentation, "Horizontal Pod Autoscaling", stabilization.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from ...shared.errors import ConfigurationError

# Share of their sequences or of their KV cache that engines should use.
TARGET_USE = 0.8
TOLERANCE = 0.1
# Smallest demand; rounded up it is one engine.
_MIN_DEMAND = 1e-6


class ScalingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Scaling options of an operator.

    Args:
        least, most: bounds of the number of engines; with ``least`` 0 all engines end while no request exists.
        wanted_wait_s: seconds within which the queued requests should be served.
        grow_after_s, shrink_after_s: for how many seconds the demand must be higher, or lower, without a break.

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
            raise ConfigurationError(f"engines must be MIN:MAX with MAX at least 1, got {self.least}:{self.most}")
        if self.wanted_wait_s <= 0:
            raise ConfigurationError(f"wanted_wait must be above 0, got {self.wanted_wait_s:g}")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a model, and the engines that serve it.

    Args:
        num_waiting: queued requests; 0 while the queue is paused.
        num_running: requests that engines have claimed.
        backlog_s: seconds that one engine needs to serve the queued requests; None while its speed is unknown.
        num_serving: serving engines, of this fleet and others.
        num_others: serving engines that are not of this fleet.
        busy: running work, in engines: 1.5 is an engine and a half.
    """

    num_waiting: int = 0
    num_running: int = 0
    backlog_s: float | None = None
    num_serving: int = 0
    num_others: int = 0
    busy: float = 0.0


def engines_demanded(load: Load, *, num_present: int, wanted_wait_s: float) -> float:
    """Return how many engines the load requires, including those of others, not rounded.

    Args:
        num_present: number of engines of the fleet.
    """
    demand = min(load.busy / TARGET_USE, num_present + load.num_others)
    if load.num_waiting and load.backlog_s is not None:
        demand = max(demand, load.backlog_s / wanted_wait_s)
    # Any request requires an engine, even if the speed of engines is unknown.
    return max(demand, _MIN_DEMAND) if load.num_waiting or load.num_running else demand


class Scaling:
    """The scaling rule with its history, for one fleet."""

    def __init__(self, options: ScalingOptions) -> None:
        self.options = options
        self._demands: deque[tuple[float, int]] = deque()
        self._began_at: float | None = None

    def target(self, now_s: float, load: Load, num_present: int) -> int:
        """Return how many engines the fleet should have from now on.

        Args:
            now_s: monotonic seconds.
            num_present: engines of the fleet, including those that start, without those that drain.
        """
        if self._began_at is None:
            self._began_at = now_s
        demand = self._own_demand(load, num_present)
        self._demands.append((now_s, demand))
        self._drop_old(now_s)
        options = self.options
        bounded = min(max(num_present, options.least), options.most)
        # Without any engine, start immediately: requests wait for the first one, and nothing can oscillate.
        if num_present == 0 and demand:
            return max(bounded, demand)
        lowest = self._over(now_s, options.grow_after_s, min)
        if lowest is not None and lowest > bounded:
            return lowest
        highest = self._over(now_s, options.shrink_after_s, max)
        if highest is not None and highest < bounded:
            return highest
        return bounded

    def _own_demand(self, load: Load, num_present: int) -> int:
        demand = engines_demanded(load, num_present=num_present, wanted_wait_s=self.options.wanted_wait_s)
        own = demand - load.num_others if demand > load.num_others else 0.0
        is_near = num_present > 0 and abs(own / num_present - 1) <= TOLERANCE
        number = num_present if is_near else math.ceil(own - 1e-9)
        return min(max(number, self.options.least), self.options.most)

    def _over(self, now_s: float, window_s: float, choose: Callable[[Iterable[int]], int]) -> int | None:
        """Return the smallest or largest demand of the last ``window_s``; None while the fleet is younger than that.

        A demand holds until the next one, so the last one before the window counts too.
        """
        assert self._began_at is not None
        if now_s - self._began_at < window_s:
            return None
        in_window = [demand for at, demand in self._demands if at > now_s - window_s]
        earlier = [demand for at, demand in self._demands if at <= now_s - window_s]
        return choose(in_window + earlier[-1:])

    def _drop_old(self, now_s: float) -> None:
        longest_s = max(self.options.grow_after_s, self.options.shrink_after_s)
        while len(self._demands) > 1 and self._demands[1][0] <= now_s - longest_s:
            self._demands.popleft()
