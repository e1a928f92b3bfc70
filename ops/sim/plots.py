"""The report as one picture of four plots."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from .report import Figures

FILE_NAME = "simulation"
DOTS_PER_INCH = 72


def draw(figures: Figures, folder: Path) -> list[Path]:
    """Write ``simulation.png`` and ``simulation.svg`` into ``folder``; the same figures give the same files."""
    # The ids of an SVG are random without it.
    with matplotlib.rc_context({"svg.hashsalt": FILE_NAME, "font.size": 8, "axes.grid": True, "grid.alpha": 0.3}):
        picture, axes = pyplot.subplots(2, 2, figsize=(10, 6), layout="constrained")
        try:
            _draw_queue(axes[0][0], figures)
            _draw_engines(axes[0][1], figures)
            _draw_waits(axes[1][0], figures)
            _draw_jain(axes[1][1], figures)
            paths = [folder / f"{FILE_NAME}.png", folder / f"{FILE_NAME}.svg"]
            picture.savefig(paths[0], dpi=DOTS_PER_INCH, metadata={"Software": None})
            picture.savefig(paths[1], metadata={"Date": None})
        finally:
            pyplot.close(picture)
    return paths


def _mark_deaths(axes: Axes, figures: Figures) -> None:
    for loss in figures.recoveries:
        axes.axvline(loss.at_s, color="tab:red", linestyle=":", linewidth=1)
    for outage in figures.outages:
        axes.axvspan(outage.at_s, outage.at_s + outage.for_s, color="tab:red", alpha=0.15, linewidth=0)


def _draw_queue(axes: Axes, figures: Figures) -> None:
    series = figures.series
    axes.plot(series.at_s, series.num_waiting, label="wait", linewidth=1)
    axes.plot(series.at_s, series.num_running, label="run", linewidth=1)
    axes.set(title="Requests (dotted: engines die; red: a shard is away)", xlabel="s", ylim=(0, None))
    axes.legend(loc="upper left")
    _mark_deaths(axes, figures)


def _draw_engines(axes: Axes, figures: Figures) -> None:
    series = figures.series
    axes.step(series.at_s, series.num_engines, where="post", label="live", linewidth=1)
    if any(series.num_wanted):
        axes.step(series.at_s, series.num_wanted, where="post", label="wanted", linewidth=1)
    axes.set(title="Engines", xlabel="s", ylim=(0, None))
    axes.legend(loc="lower left")
    _mark_deaths(axes, figures)


def _draw_waits(axes: Axes, figures: Figures) -> None:
    groups = [group for group in figures.groups if group.wait_p50_s is not None]
    places = range(len(groups))
    axes.bar([place - 0.2 for place in places], [group.wait_p50_s or 0 for group in groups], 0.4, label="p50")
    axes.bar([place + 0.2 for place in places], [group.wait_p99_s or 0 for group in groups], 0.4, label="p99")
    axes.set_xticks(list(places), [group.name for group in groups])
    axes.set(title="Wait for an engine, s", yscale="log")
    axes.legend(loc="upper left")


def _draw_jain(axes: Axes, figures: Figures) -> None:
    at_s = [one.at_s for one in figures.jain]
    axes.plot(at_s, [math.nan if one.index is None else one.index for one in figures.jain], marker="o", markersize=3)
    axes.set(title="Jain's index of weighted tokens, by 10 s", xlabel="s", ylim=(0, 1.05))
