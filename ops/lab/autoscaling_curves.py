"""Curves of load for the signal of autoscalers, and a plot of the result of each.

``python -m penstock.ops.lab.autoscaling_curves --output autoscaling.png`` draws it. Needs matplotlib (extra ``sim``).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from ..libraries import need_libraries
from ..metrics.autoscaler import ScaledDeployment

SPEED = 1000.0
# Engines hold claimed requests for some seconds.
KV_TOKENS, START_S, MAX_REPLICAS = 8000.0, 40.0, 8
HOUR_S = 3600
DOTS_PER_INCH, STEP_S = 72, 10


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
