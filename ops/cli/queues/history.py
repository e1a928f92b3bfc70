"""``penstock queue history``: metrics of a model, minute by minute."""

from __future__ import annotations

import argparse
import math
from typing import Any

import msgspec

from ....shared.broker.series import STEPS_S, SeriesPoint
from ....shared.partitions import read_series
from ....shared.process.command_line import Command, add_redis_arguments, format_table
from ...words import format_duration, format_time
from ..broker_command import OpenModel, on_model, print_json

_HEADER = ("FROM", "WAITING", "RUNNING", "IN/S", "OUT/S", "ENDED", "FAILED", "TTFT P50", "P99", "ITL P50", "WAIT P99")
_FAILED = ("failed", "expired", "parked")
QUANTILES = (0.5, 0.9, 0.99)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="may be left out if only one is known, or served")
    parser.add_argument("--hours", type=float, default=1.0, metavar="H", help="how far back, at most 2160 (default: 1)")
    parser.add_argument(
        "--step",
        type=int,
        choices=sorted(STEPS_S),
        metavar="S",
        help="60, 600 or 3600 seconds (default: the finest that is kept so long: a day, a week, 90 days)",
    )
    add_redis_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one array of points, with every field and percentiles")


async def _history(model: OpenModel, arguments: argparse.Namespace) -> None:
    points = await read_series(model.connection, model.keys, model.name, hours=arguments.hours, step_s=arguments.step)
    step_s = points[1].at - points[0].at if len(points) > 1 else min(STEPS_S)
    if arguments.json:
        print_json([_fields(point) for point in points])
    elif rows := [_row(point, step_s) for point in points if point.gauges or point.ended or point.tokens_out]:
        print(format_table(_HEADER, rows))
    else:
        print(f"nothing was counted in the last {arguments.hours:g} h")


def _row(point: SeriesPoint, step_s: float) -> tuple[str, ...]:
    waiting, running = (f"{point.gauges[name]:.1f}" if name in point.gauges else "-" for name in ("waiting", "running"))
    return (
        format_time(point.at),
        waiting,
        running,
        f"{point.tokens_in / step_s:.1f}",
        f"{point.tokens_out / step_s:.1f}",
        str(sum(point.ended.values())),
        str(sum(point.ended.get(state, 0) for state in _FAILED)),
        _quantile(point, "time_to_first_token_s", 0.5),
        _quantile(point, "time_to_first_token_s", 0.99),
        _quantile(point, "inter_token_latency_s", 0.5),
        _quantile(point, "queue_time_s", 0.99),
    )


def _quantile(point: SeriesPoint, name: str, share: float) -> str:
    """Return an upper bound of a quantile: "≤ 50 ms"."""
    value = point.quantile(name, share)
    if value is None:
        return "-"
    if math.isinf(value):
        return "longer"
    return f"≤ {1000 * value:g} ms" if value < 1 else f"≤ {format_duration(value)}"


def _fields(point: SeriesPoint) -> dict[str, Any]:
    fields = msgspec.structs.asdict(point)
    fields["quantiles"] = {
        name: {f"p{100 * share:g}": point.quantile(name, share) for share in QUANTILES} for name in point.histograms
    }
    return fields


HISTORY = Command(
    "history",
    "Show metrics minute by minute: waiting and running requests, tokens, ends, times.",
    run=on_model(_history),
    add_arguments=_add_arguments,
)
