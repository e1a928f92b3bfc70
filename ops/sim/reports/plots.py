"""The report as a picture with four plots."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from .figures import Figures

FILE_NAME = "simulation"
DOTS_PER_INCH = 72


def draw(figures: Figures, folder: Path) -> list[Path]:
    """Write ``simulation.png`` and ``simulation.svg`` into ``folder``. Equal figures give equal files."""
    # Makes the ids of the SVG reproducible.
    with matplotlib.rc_context({"svg.hashsalt": FILE_NAME, "font.size": 8, "axes.grid": True, "grid.alpha": 0.3}):
        has_more = bool(figures.partitions or figures.sessions)
        size = (10.0, 9.0 if has_more else 6.0)
        picture, axes = pyplot.subplots(3 if has_more else 2, 2, figsize=size, layout="constrained")
        try:
            _draw_queue(axes[0][0], figures)
            _draw_engines(axes[0][1], figures)
            _draw_waits(axes[1][0], figures)
            _draw_jain(axes[1][1], figures)
            if has_more:
                _draw_partitions(axes[2][0], figures)
                _draw_sessions(axes[2][1], figures)
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
    _draw_pairs(axes, [(one.name, one.wait_p50_s, one.wait_p99_s) for one in figures.groups])
    axes.set(title="Wait for an engine, s", yscale="log")


def _draw_partitions(axes: Axes, figures: Figures) -> None:
    _draw_pairs(axes, [(one.name, one.wait_p50_s, one.wait_p99_s) for one in figures.partitions])
    axes.set(title="Wait for an engine by partition, s", yscale="log")


def _draw_sessions(axes: Axes, figures: Figures) -> None:
    names = [one.name for one in figures.sessions]
    axes.bar(names, [100 * (one.found_share or 0) for one in figures.sessions], 0.4)
    axes.set(title="Tokens of the turn before that the engine had, %", ylim=(0, 100))


def _draw_pairs(axes: Axes, pairs: list[tuple[str, float | None, float | None]]) -> None:
    """Draw bars of median and p99 side by side, where they are available."""
    available = [pair for pair in pairs if pair[1] is not None]
    places = range(len(available))
    for offset, which, label in ((-0.2, 1, "p50"), (0.2, 2, "p99")):
        axes.bar([place + offset for place in places], [pair[which] or 0 for pair in available], 0.4, label=label)
    axes.set_xticks(list(places), [pair[0] for pair in available])
    axes.legend(loc="upper left")


def _draw_jain(axes: Axes, figures: Figures) -> None:
    at_s = [one.at_s for one in figures.jain]
    axes.plot(at_s, [math.nan if one.index is None else one.index for one in figures.jain], marker="o", markersize=3)
    axes.set(title="Jain's index of weighted tokens, by 10 s", xlabel="s", ylim=(0, 1.05))
