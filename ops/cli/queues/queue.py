"""``penstock queue``: show, pause, purge and configure the queues of models, and their metrics minute by minute."""

from __future__ import annotations

import argparse
import asyncio
import math
import shlex
from typing import Any

import msgspec

from ....shared.broker import Queue
from ....shared.broker.series import STEPS_S, SeriesPoint
from ....shared.errors import PenstockError, ValidationError
from ....shared.partitions import Layouts, change_partitions, partition_stats, read_series
from ....shared.process.command_line import EXIT_FAILED, Command, add_redis_arguments, format_table
from ....shared.values.names import partition_name
from ...words import format_duration, format_time
from ..command_parts import OpenModel, confirmed, on_model, print_json, run_on_model
from .policy import CONFIGURE, TENANT
from .show import LIST, SHOW, TENANTS

_HEADER = ("FROM", "WAITING", "RUNNING", "IN/S", "OUT/S", "ENDED", "FAILED", "TTFT P50", "P99", "ITL P50", "WAIT P99")
_FAILED = ("failed", "expired", "parked")
QUANTILES = (0.5, 0.9, 0.99)
POLL_INTERVAL_S = 0.5


def _add_history_arguments(parser: argparse.ArgumentParser) -> None:
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
        print_json([_history_fields(point) for point in points])
    elif rows := [_history_row(point, step_s) for point in points if point.gauges or point.ended or point.tokens_out]:
        print(format_table(_HEADER, rows))
    else:
        print(f"nothing was counted in the last {arguments.hours:g} h")


def _history_row(point: SeriesPoint, step_s: float) -> tuple[str, ...]:
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


def _history_fields(point: SeriesPoint) -> dict[str, Any]:
    fields = msgspec.structs.asdict(point)
    fields["quantiles"] = {
        name: {f"p{100 * share:g}": point.quantile(name, share) for share in QUANTILES} for name in point.histograms
    }
    return fields


HISTORY = Command(
    "history",
    "Show metrics minute by minute: waiting and running requests, tokens, ends, times.",
    run=on_model(_history),
    add_arguments=_add_history_arguments,
)


def _add_pause_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    what_runs = parser.add_mutually_exclusive_group()
    what_runs.add_argument("--wait", action="store_true", help="return when no request is running")
    what_runs.add_argument(
        "--requeue",
        "--put-back",
        dest="requeue",
        action="store_true",
        help="requeue running requests to resume after their last tokens",
    )
    add_redis_arguments(parser)


def _add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    add_redis_arguments(parser)


def _add_purge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--tenant", required=True, help="whose requests")
    parser.add_argument("--band", default="", help="only of this band")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_redis_arguments(parser)


async def _pause(model: OpenModel, arguments: argparse.Namespace) -> None:
    queue, name = await model.queue(), model.name
    num_running = await model.operations.pause(name, put_back=arguments.requeue)
    if arguments.requeue:
        outcome = f"{num_running} running requests were requeued"
    else:
        outcome = f"{num_running} still running" if num_running else "none is running"
    print(
        f"the queue of {name} is paused, {outcome}; it stays paused across restarts, until "
        f"'penstock queue resume {shlex.quote(name)}'",
        flush=True,
    )
    if arguments.wait:
        await _wait_until_idle(queue, num_running)


async def _wait_until_idle(queue: Queue, num_running: int) -> None:
    """Wait until no request runs, and print the number of running requests whenever it changes."""
    try:
        while num_running:
            await asyncio.sleep(POLL_INTERVAL_S)
            stats = await queue.stats()
            if not stats.is_paused:
                raise PenstockError(f"the queue of {stats.model} was resumed meanwhile; {stats.num_running} run")
            if stats.num_running != num_running:
                num_running = stats.num_running
                print(f"{num_running} still running" if num_running else "none is running any more", flush=True)
    except asyncio.CancelledError:
        print("it stays paused", flush=True)
        raise


async def _resume(model: OpenModel, _: argparse.Namespace) -> None:
    queue, name = await model.queue(), model.name
    was_paused = await model.operations.resume(name)
    depth = (await queue.stats()).depth
    print(f"the queue of {name} {'is resumed' if was_paused else 'was not paused'}; {depth} wait")


async def _count_waiting(model: OpenModel, arguments: argparse.Namespace) -> int:
    """Return how many requests a purge would cancel now."""
    queue = await model.queue()
    stats = await queue.stats(tenants=True)
    bands = [band.band for band in stats.bands]
    if arguments.band and arguments.band not in bands:
        raise ValidationError(f"band must be one of {', '.join(bands)}, got {arguments.band!r}")
    lanes = [lane for tenant in stats.tenants if tenant.tenant == arguments.tenant for lane in tenant.lanes]
    return sum(lane.depth for lane in lanes if arguments.band in ("", lane.band))


async def _purge_queue(model: OpenModel, arguments: argparse.Namespace) -> int:
    return await model.operations.purge(model.name, arguments.tenant, arguments.band)


def _add_partitions_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="also one that no worker has served yet")
    parser.add_argument("number", metavar="N", nargs="?", type=int, help="of partitions from now on; shown without it")
    parser.add_argument(
        "--spread", metavar="TENANTS", help="tenants, with commas between them, that go to all partitions; '' for none"
    )
    add_redis_arguments(parser)


async def _partitions(model: OpenModel, arguments: argparse.Namespace) -> None:
    connection, keys, name = model.connection, model.keys, model.name
    layout = await Layouts(connection, keys).read(name)
    if arguments.number is not None or arguments.spread is not None:
        spread = None if arguments.spread is None else [word for word in arguments.spread.split(",") if word]
        number = layout.num if arguments.number is None else arguments.number
        layout = await change_partitions(connection, keys, name, number, spread)
    rows = [
        [stats.model, str(stats.depth), str(stats.num_running), "paused" if stats.is_paused else "open"]
        for stats in await partition_stats(connection, keys, name, layout.num_known)
    ]
    print(format_table(("PARTITION", "WAITING", "RUNNING", "STATE"), rows))
    if layout.num_known > layout.num:
        print(f"those from {partition_name(name, layout.num)} on go: once nothing is left there, run this again")
    if layout.spread:
        print(f"spread over all: {', '.join(layout.spread)}")


def _run_purge(arguments: argparse.Namespace) -> int:
    whose = f"of tenant {arguments.tenant}" + (f" in band {arguments.band}" if arguments.band else "")
    if not arguments.yes:
        num_waiting = run_on_model(_count_waiting, arguments)
        if num_waiting and not confirmed(f"cancel what waits {whose} ({num_waiting})?", arguments):
            print("nothing is cancelled")
            return EXIT_FAILED
    print(f"{run_on_model(_purge_queue, arguments)} cancelled {whose}")
    return 0


COMMAND = Command(
    "queue",
    "Show the queues of models; pause, resume, purge and configure them.",
    subcommands=(
        LIST,
        SHOW,
        TENANTS,
        HISTORY,
        Command(
            "pause",
            "Start no more requests until resumed; running requests keep running.",
            run=on_model(_pause),
            add_arguments=_add_pause_arguments,
        ),
        Command(
            "partitions",
            "Change or show the number of a model's partitions.",
            run=on_model(_partitions, wait_for_model=True),
            add_arguments=_add_partitions_arguments,
        ),
        Command("resume", "Hand out requests again.", run=on_model(_resume), add_arguments=_add_resume_arguments),
        Command(
            "purge",
            "Cancel waiting requests of a tenant that have not run yet.",
            run=_run_purge,
            add_arguments=_add_purge_arguments,
        ),
        CONFIGURE,
        TENANT,
    ),
)
