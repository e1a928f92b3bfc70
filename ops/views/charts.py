"""Charts of metrics over hours, each with a table. They are drawn as SVG, so pages need no script.

The lines of a chart lie in a box of 100 by 30. A line is interrupted where values are unknown. A script reads the value
at the cursor from the table.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...shared.broker.series import SeriesPoint, summed_points
from ...shared.errors import RedisUnavailableError, ValidationError
from ...shared.partitions import read_series
from .source import PATIENCE_S, PageSnapshot, together
from .words import moment

WIDTH, HEIGHT = 100.0, 30.0
# Query parameters that select what the charts show.
CHART_QUERY = ("span", "compare")
DEFAULT_SPAN = "1h"
# Engines add to a series about this often.
CACHED_S = 10.0
# States that count as failures.
_FAILED = ("failed", "expired", "parked")
Value = Callable[[SeriesPoint, int], float | None]


@dataclass(frozen=True)
class Span:
    """A period to show: hours, seconds of a step and of a mark on the axis of time, and the words for both formats."""

    hours: float
    step_s: int
    mark_s: int
    mark_format: str
    step_words: str


SPANS: Mapping[str, Span] = {
    "1h": Span(1, 60, 900, "%H:%M", "minute"),
    "24h": Span(24, 600, 6 * 3600, "%H:%M", "10 minutes"),
    "7d": Span(168, 3600, 2 * 86400, "%b %d", "hour"),
}


@dataclass(frozen=True)
class Line:
    """A line of a chart: label, column in the table, and a function of a point and the step in s to the value."""

    word: str
    column: str
    value: Value


@dataclass(frozen=True)
class Chart:
    """A chart: its title, the filter that formats its values, and its lines. ``is_per_step`` completes the title."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    is_per_step: bool = False


def _has_sample(point: SeriesPoint) -> bool:
    """Return whether any process has counted in this step. If none has, its sums are unknown, not 0."""
    return bool(point.gauges or point.tokens_in or point.tokens_out or point.ended)


def _rate(name: str) -> Value:
    return lambda point, step_s: getattr(point, name) / step_s if _has_sample(point) else None


def _gauge(name: str) -> Value:
    return lambda point, _: point.gauges.get(name)


def quantile_of(point: SeriesPoint, name: str, share: float) -> float | None:
    """Return an upper bound of this share of the values; the largest bound for larger values; None without values."""
    quantile = point.quantile(name, share)
    if quantile is None or not math.isinf(quantile):
        return quantile
    return point.histograms[name].bounds[-1] if point.histograms[name].bounds else None


def _quantile(name: str, share: float) -> Value:
    return lambda point, _: quantile_of(point, name, share)


def _ended(*states: str) -> Value:
    return lambda point, _: float(sum(point.ended.get(one, 0) for one in states)) if _has_sample(point) else None


CHARTS = (
    Chart(
        "Tokens per second",
        "number",
        (
            Line("prompt", "tokens_in_per_s", _rate("tokens_in")),
            Line("output", "tokens_out_per_s", _rate("tokens_out")),
        ),
    ),
    Chart(
        "Requests ended",
        "number",
        (
            Line("finished", "finished", _ended("finished")),
            Line("cancelled", "cancelled", _ended("cancelled")),
            Line("failed, expired or parked", "failed", _ended(*_FAILED)),
        ),
        is_per_step=True,
    ),
    Chart(
        "Time to first token",
        "length_of_time",
        (
            Line("p50", "ttft_p50_s", _quantile("time_to_first_token_s", 0.5)),
            Line("p99", "ttft_p99_s", _quantile("time_to_first_token_s", 0.99)),
        ),
    ),
    Chart(
        "Time between tokens",
        "length_of_time",
        (
            Line("p50", "itl_p50_s", _quantile("inter_token_latency_s", 0.5)),
            Line("p99", "itl_p99_s", _quantile("inter_token_latency_s", 0.99)),
        ),
    ),
    Chart(
        "Waiting and running requests",
        "number",
        (Line("waiting", "waiting", _gauge("waiting")), Line("running", "running", _gauge("running"))),
    ),
)


async def read_charts(snapshot: PageSnapshot, models: Sequence[str], params: Mapping[str, str]) -> dict[str, Any]:
    """Return what the template ``parts/charts.html`` shows, summed over ``models``.

    Raises:
        ValidationError: the query's ``span`` is not in ``SPANS``.
    """
    name, is_compared = params.get("span") or DEFAULT_SPAN, bool(params.get("compare"))
    if name not in SPANS:
        raise ValidationError(f"span must be one of {', '.join(SPANS)}, got {name!r}")
    span = SPANS[name]

    async def read_all() -> dict[str, Any]:
        series = await together(*(_points(snapshot, model, span, is_compared) for model in models))
        counted = [points for points in series if points]
        points = summed_points(counted) if counted else []
        num = min(len(points), round(3600 * span.hours / span.step_s))
        now, before = points[len(points) - num :], points[: len(points) - num]
        charts = [_drawn_chart(chart, now, before, span) for chart in CHARTS]
        return {
            "span": name,
            "spans": list(SPANS),
            "is_compared": is_compared,
            "charts": charts,
            "has_counted": any(chart["has_counted"] for chart in charts),
        }

    return await snapshot.source.cached(("charts", name, is_compared, *models), CACHED_S, read_all)


async def _points(snapshot: PageSnapshot, model: str, span: Span, is_compared: bool) -> list[SeriesPoint]:
    """Return the finished steps of a model's span, without the current one; [] if its Redis is unreachable.

    If the span is compared, the steps of the one before come first.
    """
    source, hours = snapshot.source, span.hours * (2 if is_compared else 1)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return (await read_series(source.connection, source.keys, model, hours=hours, step_s=span.step_s))[:-1]
    except (TimeoutError, RedisUnavailableError):
        return []


def _drawn_chart(chart: Chart, now: Sequence[SeriesPoint], before: Sequence[SeriesPoint], span: Span) -> dict[str, Any]:
    """Return a chart with its lines, axes and table. The lines of the period ``before`` follow those of ``now``."""
    lines = [(line.word, line.column, line.column, now) for line in chart.lines]
    if before:
        lines += [(f"{line.word} before", f"{line.column}_before", line.column, before) for line in chart.lines]
    values = {line.column: line.value for line in chart.lines}
    columns = []
    for _, _, column, points in lines:
        numbers = [values[column](point, span.step_s) for point in points]
        columns.append([None] * (len(now) - len(numbers)) + numbers)
    limit = nice_limit(max((value for column in columns for value in column if value is not None), default=0.0))
    starts = [point.at for point in now]
    return {
        "title": f"{chart.title} per {span.step_words}" if chart.is_per_step else chart.title,
        "unit": chart.unit,
        "levels": [limit, limit / 2, 0.0],
        "marks": _marks(starts, span),
        "lines": [
            {"word": word, "column": name, "path": path_of(column, limit), "last": _last(column)}
            for (word, name, _, _), column in zip(lines, columns, strict=True)
        ],
        "rows": [
            {
                "from": at,
                "x": round(_x(i, len(starts)), 1),
                **{name: column[i] for (_, name, _, _), column in zip(lines, columns, strict=True)},
            }
            for i, at in enumerate(starts)
        ],
        "has_counted": any(value for column in columns for value in column),
    }


def _marks(starts: Sequence[float], span: Span) -> list[tuple[float, str]]:
    """Return place (of a width of 100) and text of the marks on the axis of time, at round times of UTC."""
    return [
        (round(_x(i, len(starts)), 1), time.strftime(span.mark_format, time.gmtime(at)))
        for i, at in enumerate(starts)
        if int(at) % span.mark_s == 0
    ]


def nice_limit(value: float) -> float:
    """Return the end of an axis for values up to ``value``: 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= value * (1 - 1e-9))


def rows_of(history: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each step with the columns of all charts, for programs and spreadsheets."""
    charts = history["charts"]
    by_step = zip(*(chart["rows"] for chart in charts), strict=True)
    return [
        {"from": rows[0]["from"], "from_utc": moment(rows[0]["from"])}
        | {name: value for row in rows for name, value in row.items() if name not in ("from", "x")}
        for rows in by_step
    ]


def _last(column: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(column) if value is not None), None)


def _x(index: int, number: int) -> float:
    return WIDTH * index / max(1, number - 1)


# Width of the dash for a single point.
DASH = 1.0


def path_of(column: Sequence[float | None], limit: float) -> str:
    """Return the SVG path of a line in a box of ``WIDTH`` by ``HEIGHT``, whose top is ``limit``."""
    parts, is_down = [], False
    for i, value in enumerate(column):
        if value is None:
            is_down = False
            continue
        x, y = _x(i, len(column)), HEIGHT * (1 - value / limit) if limit else HEIGHT
        if not is_down and (i + 1 == len(column) or column[i + 1] is None):
            # A dash for a point between two gaps, since a dot would hardly be visible.
            parts.append(f"M{x - DASH / 2:.1f} {y:.1f}h{DASH:g}")
        else:
            parts.append(f"{'L' if is_down else 'M'}{x:.1f} {y:.1f}")
        is_down = True
    return "".join(parts)
