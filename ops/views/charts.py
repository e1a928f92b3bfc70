"""What was counted over hours, as small pictures with a table behind each; drawn here, so they need no script.

A picture is lines in a box of 100 by 30, and a line is broken where nothing is known.
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
from .source import PATIENCE_S, Moment, together

WIDTH, HEIGHT = 100.0, 30.0
# Hours and seconds of a step, by the word of the query.
SPANS: Mapping[str, tuple[float, int]] = {"1h": (1, 60), "24h": (24, 600), "7d": (168, 3600)}
DEFAULT_SPAN = "1h"
# Engines add to a series so often.
KEPT_S = 10.0
# As the bad ends of a request.
_FAILED = ("failed", "expired", "parked")
Value = Callable[[SeriesPoint, int], float | None]


@dataclass(frozen=True)
class Line:
    """One line of a picture: its word, its column in the table, and its value at a point with a step of so many s."""

    word: str
    column: str
    value: Value


def _rate(name: str) -> Value:
    return lambda point, step_s: getattr(point, name) / step_s


def _gauge(name: str) -> Value:
    return lambda point, _: point.gauges.get(name)


def _quantile(name: str, share: float) -> Value:
    def value(point: SeriesPoint, _: int) -> float | None:
        found = point.quantile(name, share)
        if found is None or not math.isinf(found):
            return found
        return point.histograms[name].bounds[-1] if point.histograms[name].bounds else None

    return value


def _ended(*states: str) -> Value:
    return lambda point, _: float(sum(point.ended.get(state, 0) for state in states))


# By the title of the picture, with the filter that writes its values.
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


async def read_charts(moment: Moment, models: Sequence[str], params: Mapping[str, str]) -> dict[str, Any]:
    """Return what the template ``charts.html`` shows of some models together.

    Raises:
        ValidationError: the query's ``span`` is none of ``SPANS``.
    """
    span = params.get("span") or DEFAULT_SPAN
    if span not in SPANS:
        raise ValidationError(f"span must be one of {', '.join(SPANS)}, got {span!r}")

    async def read() -> dict[str, Any]:
        series = await together(*(_points(moment, model, span) for model in models))
        known = [points for points in series if points]
        points = summed_points(known) if known else []
        charts = [_chart(title, unit, lines, points, SPANS[span][1]) for title, unit, lines in CHARTS]
        return {"span": span, "spans": list(SPANS), "charts": charts, "has_counted": any(one["rows"] for one in charts)}

    return await moment.source.kept(("charts", span, *models), KEPT_S, read)


async def _points(moment: Moment, model: str, span: str) -> list[SeriesPoint]:
    """The steps of a model's span that have ended, the one under way left out; [] where its Redis is away."""
    source, (hours, step_s) = moment.source, SPANS[span]
    try:
        async with asyncio.timeout(PATIENCE_S):
            return (await read_series(source.connection, source.keys, model, hours=hours, step_s=step_s))[:-1]
    except (TimeoutError, RedisUnavailableError):
        return []


def _chart(title: str, unit: str, lines: Sequence[Line], points: Sequence[SeriesPoint], step_s: int) -> dict[str, Any]:
    """A picture and its table; without rows where nothing was counted."""
    columns = [[line.value(point, step_s) for point in points] for line in lines]
    most = max((value for column in columns for value in column if value is not None), default=0.0)
    rows = [
        {"from": point.at, **{line.column: column[i] for line, column in zip(lines, columns, strict=True)}}
        for i, point in enumerate(points)
        if any(column[i] for column in columns)
    ]
    return {
        "title": title,
        "unit": unit,
        "most": most,
        "lines": [
            {"word": line.word, "column": line.column, "path": path_of(column, most), "last": _last(column)}
            for line, column in zip(lines, columns, strict=True)
        ],
        "rows": rows,
        "began_at": points[0].at if points else None,
    }


def facts_of(history: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The tables behind the pictures, by title: what a program reads."""
    return {chart["title"]: chart["rows"] for chart in history["charts"]}


def _last(column: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(column) if value is not None), None)


def path_of(column: Sequence[float | None], most: float) -> str:
    """Return the path of a line through a box of ``WIDTH`` by ``HEIGHT``, of which ``most`` is the top."""
    parts, is_down = [], False
    for i, value in enumerate(column):
        if value is None:
            is_down = False
            continue
        x = WIDTH * i / max(1, len(column) - 1)
        y = HEIGHT * (1 - value / most) if most else HEIGHT
        # A move alone draws nothing: what stands between two gaps is seen as a dot by its round cap.
        parts.append(f"{'L' if is_down else 'M'}{x:.1f} {y:.1f}" + ("" if is_down else "h0"))
        is_down = True
    return "".join(parts)
