"""Charts of metrics over hours, each with a table. They are drawn here as SVG paths, so pages need no script.

A chart has lines in a box of 100 by 30. A line is interrupted where values are unknown.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...shared.broker.series import SeriesPoint, summed_points
from ...shared.errors import RedisUnavailableError, ValidationError
from ...shared.partitions import read_series
from .source import PATIENCE_S, PageSnapshot, together

WIDTH, HEIGHT = 100.0, 30.0
# Hours and step in seconds, by the value of ``span`` in the query.
SPANS: Mapping[str, tuple[float, int]] = {"1h": (1, 60), "24h": (24, 600), "7d": (168, 3600)}
DEFAULT_SPAN = "1h"
# Engines add to a series about this often.
CACHED_S = 10.0
# States that count as failures.
_FAILED = ("failed", "expired", "parked")
Value = Callable[[SeriesPoint, int], float | None]


@dataclass(frozen=True)
class Line:
    """A line of a chart: label, column in the table, and a function of a point and the step in s to the value."""

    word: str
    column: str
    value: Value


def _rate(name: str) -> Value:
    return lambda point, step_s: getattr(point, name) / step_s


def _gauge(name: str) -> Value:
    return lambda point, _: point.gauges.get(name)


def _quantile(name: str, share: float) -> Value:
    def value(point: SeriesPoint, _: int) -> float | None:
        quantile = point.quantile(name, share)
        if quantile is None or not math.isinf(quantile):
            return quantile
        return point.histograms[name].bounds[-1] if point.histograms[name].bounds else None

    return value


def _ended(*states: str) -> Value:
    return lambda point, _: float(sum(point.ended.get(state, 0) for state in states))


# Title, filter that formats the values, lines.
CHARTS: tuple[tuple[str, str, tuple[Line, ...]], ...] = (
    (
        "Tokens per second",
        "number",
        (Line("in", "tokens_in_per_s", _rate("tokens_in")), Line("out", "tokens_out_per_s", _rate("tokens_out"))),
    ),
    (
        "Requests ended",
        "number",
        (
            Line("finished", "finished", _ended("finished")),
            Line("cancelled", "cancelled", _ended("cancelled")),
            Line("failed, expired or parked", "failed", _ended(*_FAILED)),
        ),
    ),
    (
        "Time to the first token",
        "length_of_time",
        (
            Line("half within", "ttft_p50_s", _quantile("time_to_first_token_s", 0.5)),
            Line("99 % within", "ttft_p99_s", _quantile("time_to_first_token_s", 0.99)),
        ),
    ),
    (
        "Time between tokens",
        "length_of_time",
        (
            Line("half within", "itl_p50_s", _quantile("inter_token_latency_s", 0.5)),
            Line("99 % within", "itl_p99_s", _quantile("inter_token_latency_s", 0.99)),
        ),
    ),
    (
        "Waiting and running",
        "number",
        (Line("waiting", "waiting", _gauge("waiting")), Line("running", "running", _gauge("running"))),
    ),
)


async def read_charts(snapshot: PageSnapshot, models: Sequence[str], params: Mapping[str, str]) -> dict[str, Any]:
    """Return what the template ``parts/charts.html`` shows, summed over ``models``.

    Raises:
        ValidationError: the query's ``span`` is not in ``SPANS``.
    """
    span = params.get("span") or DEFAULT_SPAN
    if span not in SPANS:
        raise ValidationError(f"span must be one of {', '.join(SPANS)}, got {span!r}")

    async def read() -> dict[str, Any]:
        series = await together(*(_points(snapshot, model, span) for model in models))
        counted = [points for points in series if points]
        points = summed_points(counted) if counted else []
        charts = [_chart(title, unit, lines, points, SPANS[span][1]) for title, unit, lines in CHARTS]
        return {
            "span": span,
            "spans": list(SPANS),
            "charts": charts,
            "has_counted": any(chart["rows"] for chart in charts),
        }

    return await snapshot.source.cached(("charts", span, *models), CACHED_S, read)


async def _points(snapshot: PageSnapshot, model: str, span: str) -> list[SeriesPoint]:
    """Return the finished steps of a model's span, without the current one; [] if its Redis is unreachable."""
    source, (hours, step_s) = snapshot.source, SPANS[span]
    try:
        async with asyncio.timeout(PATIENCE_S):
            return (await read_series(source.connection, source.keys, model, hours=hours, step_s=step_s))[:-1]
    except (TimeoutError, RedisUnavailableError):
        return []


def _chart(title: str, unit: str, lines: Sequence[Line], points: Sequence[SeriesPoint], step_s: int) -> dict[str, Any]:
    """Return a chart and its table, which has no rows if nothing was counted."""
    columns = [[line.value(point, step_s) for point in points] for line in lines]
    limit = max((value for column in columns for value in column if value is not None), default=0.0)
    rows = [
        {"from": point.at, **{line.column: column[i] for line, column in zip(lines, columns, strict=True)}}
        for i, point in enumerate(points)
        if any(column[i] for column in columns)
    ]
    return {
        "title": title,
        "unit": unit,
        "most": limit,
        "lines": [
            {"word": line.word, "column": line.column, "path": path_of(column, limit), "last": _last(column)}
            for line, column in zip(lines, columns, strict=True)
        ],
        "rows": rows,
        "began_at": points[0].at if points else None,
    }


def facts_of(history: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of the charts by title, for programs."""
    return {chart["title"]: chart["rows"] for chart in history["charts"]}


def _last(column: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(column) if value is not None), None)


def path_of(column: Sequence[float | None], limit: float) -> str:
    """Return the SVG path of a line in a box of ``WIDTH`` by ``HEIGHT``, whose top is ``limit``."""
    parts, is_down = [], False
    for i, value in enumerate(column):
        if value is None:
            is_down = False
            continue
        x = WIDTH * i / max(1, len(column) - 1)
        y = HEIGHT * (1 - value / limit) if limit else HEIGHT
        # A move alone draws nothing. "h0" draws a dot with a round cap for a point between two gaps.
        parts.append(f"{'L' if is_down else 'M'}{x:.1f} {y:.1f}" + ("" if is_down else "h0"))
        is_down = True
    return "".join(parts)
