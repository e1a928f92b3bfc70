"""Curves of load for the signal of autoscalers, a model of an autoscaler, and a plot of the result of each.

The model is KEDA's polling, and the scaler of Kubernetes with its windows and policies.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

from ...shared.deployment.records import EngineHeartbeat
from ...shared.messages.supervision import EngineState
from ...shared.queue.stats import QueueStats
from ..cli.command_parts import need_libraries
from ..metrics.wanted import ServiceRate, WantedOptions, wanted_engines

SPEED = 1000.0
# Engines hold claimed requests for some seconds.
KV_TOKENS, START_S, MAX_REPLICAS = 8000.0, 40.0, 8
HOUR_S = 3600
DOTS_PER_INCH, STEP_S = 72, 10
POLL_S = 10
UP_WINDOW_S, DOWN_WINDOW_S = 30, 300
UP_PODS_A_MINUTE, DOWN_PODS_A_2_MINUTES = 2, 1
COOLDOWN_S = 300
# The HPA ignores deviations within a tenth.
TOLERANCE = 0.1


@dataclass(frozen=True)
class Curve:
    """A load over time.

    Attributes:
        arrivals: tokens that come in a second.
    """

    title: str
    seconds: int
    arrivals: Callable[[int], float]

    def run(self) -> ScaledDeployment:
        """Simulate the curve, and return the deployment."""
        deployment = ScaledDeployment(SPEED, KV_TOKENS, START_S, MAX_REPLICAS)
        deployment.run(self.seconds, self.arrivals)
        return deployment


def _day(now: int) -> float:
    return max(0.0, -5 * SPEED * math.cos(2 * math.pi * now / (24 * HOUR_S)))


def _noise() -> Callable[[int], float]:
    random = Random(0)
    loads = [2 * SPEED * random.uniform(0.2, 1.8) for _ in range(4 * HOUR_S)]
    return loads.__getitem__


STEADY = Curve("A steady load of 2.5 engines", HOUR_S, lambda now: 2.5 * SPEED)
BURST = Curve("Five minutes of six engines' load", 2 * HOUR_S, lambda now: 6 * SPEED if 600 <= now < 900 else 0.0)


DAY = Curve("A day: nothing at night, five engines' load at noon", 24 * HOUR_S, _day)
NOISE = Curve("Noise around the load of two engines", 4 * HOUR_S, _noise())


CURVES = (STEADY, BURST, DAY, NOISE)


class Autoscaler:
    """An autoscaler that decides every ``POLL_S``, configured as the ScaledObject of the guide."""

    def __init__(self, max_replicas: int) -> None:
        self.replicas = 0
        self._max = max_replicas
        self._recommended: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()
        self._active_at = -math.inf

    def poll(self, now: float, wanted: float) -> None:
        """Read the signal at a time in s, and update ``replicas``."""
        if wanted > 0:
            self._active_at = now
        if self.replicas == 0:
            if wanted > 0:
                self._scale_to(now, 1)
            return
        if now - self._active_at > COOLDOWN_S:
            self._scale_to(now, 0)
            return
        is_near = abs(wanted / self.replicas - 1) <= TOLERANCE
        wish = self.replicas if is_near else min(max(math.ceil(wanted), 1), self._max)
        self._recommended.append((now, wish))
        while self._recommended[0][0] < now - DOWN_WINDOW_S:
            self._recommended.popleft()
        lowest = min(wish for at, wish in self._recommended if at >= now - UP_WINDOW_S)
        highest = max(wish for _, wish in self._recommended)
        if lowest > self.replicas:
            self._scale_to(now, min(lowest, self.replicas + UP_PODS_A_MINUTE - self._changed(now - 60, 1)))
        elif highest < self.replicas:
            self._scale_to(now, max(highest, self.replicas - DOWN_PODS_A_2_MINUTES + self._changed(now - 120, -1)))

    def _changed(self, since: float, sign: int) -> int:
        return sum(abs(change) for at, change in self._changes if at > since and change * sign > 0)

    def _scale_to(self, now: float, replicas: int) -> None:
        if replicas != self.replicas:
            self._changes.append((now, replicas - self.replicas))
            self.replicas = replicas


class ScaledDeployment:
    """A simulated queue and engines that serve ``engine_tokens_per_s`` each and start in ``start_s``.

    Attributes:
        replicas: requested replicas, for each second.
        waiting: waiting tokens, for each second.
        arrived: total of arrived tokens.
        served: total of served tokens.
        longest_wait_s: longest wait of the last token in the queue, at the speed of the serving engines.
    """

    def __init__(self, engine_tokens_per_s: float, kv_tokens: float, start_s: float, max_replicas: int) -> None:
        self._speed, self._kv_tokens, self._start_s = engine_tokens_per_s, kv_tokens, start_s
        self.scaler = Autoscaler(max_replicas)
        self._ready_at: list[float] = []
        self._rate, self._options = ServiceRate(), WantedOptions()
        self._waiting = self._running = self._mean_rate = 0.0
        self.served = self.arrived = 0.0
        self.replicas: list[int] = []
        self.waiting: list[float] = []
        self.longest_wait_s = 0.0

    def run(self, seconds: int, arrivals: Callable[[int], float]) -> None:
        """Simulate ``seconds``, with ``arrivals(second)`` tokens per second."""
        for now in range(seconds):
            self._step(now, arrivals(now))

    def _step(self, now: int, arriving: float) -> None:
        while len(self._ready_at) < self.scaler.replicas:
            self._ready_at.append(now + self._start_s)
        # The newest engine leaves first; other engines resume its requests.
        del self._ready_at[self.scaler.replicas :]
        serving = sum(at <= now for at in self._ready_at)
        self.arrived += arriving
        self._waiting += arriving
        capacity = max(0.0, serving * self._kv_tokens - self._running)
        claimed = min(capacity, self._waiting)
        self._waiting -= claimed
        self._running += claimed
        # By Little's law: each token stays as long as in an engine with a full cache at full speed.
        num_ended = min(self._running * self._speed / self._kv_tokens, serving * self._speed)
        self._running -= num_ended
        self.served += num_ended
        if serving and num_ended:
            self._mean_rate += (num_ended - self._mean_rate) / 30
            self.longest_wait_s = max(self.longest_wait_s, self._waiting / (serving * self._speed))
        if now % POLL_S == 0:
            self.scaler.poll(now, self._wanted(serving))
        self.replicas.append(self.scaler.replicas)
        self.waiting.append(self._waiting)

    def _wanted(self, serving: int) -> float:
        queue = QueueStats(
            model="m",
            paused_at=None,
            depth=int(self._waiting > 0),
            num_tokens=round(self._waiting),
            num_running=0,
            num_returned=0,
            oldest_age_s=0.0,
            estimated_wait_s=None,
            requests_per_s=0.0,
            tokens_per_s=0.0,
            mean_output_tokens=0.0,
            bands=[],
            num_engines=serving,
            full_tokens_per_s=self._mean_rate,
        )
        usage = self._running / (serving * self._kv_tokens) if serving else 0.0
        engines = [
            EngineHeartbeat(
                worker_id="w",
                engine_id=str(number),
                model="m",
                state=EngineState.BUSY,
                host="h",
                worker_pid=1,
                core_pid=2,
                kv_cache_usage=usage,
            )
            for number in range(serving)
        ]
        return wanted_engines(queue, engines, self._rate, self._options)

    def num_turns(self) -> int:
        """Return how often the number of replicas changed from growing to shrinking or back."""
        changes = [after - before for before, after in pairwise(self.replicas)]
        signs = [change > 0 for change in changes if change]
        return sum(before != after for before, after in pairwise(signs))


def draw(path: Path) -> None:
    """Write a plot of all curves: load, engines and waiting tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"font.size": 8, "axes.grid": True, "grid.alpha": 0.3}):
        picture, axes = pyplot.subplots(2, 2, figsize=(10, 6), layout="constrained")
        try:
            for plot, curve in zip(axes.flat, CURVES, strict=True):
                run, seconds = curve.run(), range(0, curve.seconds, STEP_S)
                at_h = [second / HOUR_S for second in seconds]
                load = [curve.arrivals(second) / SPEED for second in seconds]
                plot.plot(at_h, load, label="load", linewidth=0.5, color="tab:gray")
                waiting = [run.waiting[second] / SPEED / 10 for second in seconds]
                plot.plot(at_h, waiting, label="waits, in 10 s of an engine", linewidth=1, color="tab:red")
                engines = [run.replicas[second] for second in seconds]
                plot.step(at_h, engines, where="post", label="engines", linewidth=1.5, color="tab:blue")
                plot.set(title=curve.title, xlabel="h", ylim=(0, MAX_REPLICAS + 1))
            axes.flat[0].legend(loc="upper right")
            picture.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})
        finally:
            pyplot.close(picture)


def main() -> int:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description="Draw what the autoscaling signal makes of four curves of load.")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="a PNG or SVG")
    arguments = parser.parse_args()
    need_libraries("the picture", "matplotlib", extra="sim")
    draw(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
