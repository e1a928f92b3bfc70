"""``penstock usage``: the use of tenants, keys, models and adapters, and its cost."""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from ....producer.control.usage import (
    Grouping,
    Prices,
    Usage,
    UsageQuery,
    read_usage,
    show_time,
    total_of,
    usage_span,
)
from ....shared.connection import CommandConnection
from ....shared.keys import Keys
from ....shared.process.command_line import Command, add_redis_arguments, format_table
from ..command_parts import add_prices_argument, chosen_prices, print_json, run_on_redis

# Columns of the table; CSV and JSON have all sums.
_COLUMNS = ("prompt", "cached", "output", "embedding", "recomputed", "images")


def _add_usage_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--by", type=Grouping, choices=list(Grouping), default=Grouping.TENANT, help="(tenant)")
    today = show_time(int(time.time()))
    parser.add_argument(
        "--from", dest="start", metavar="TIME", help=f"a day or hour of UTC, as {today} or {today}T10 (30 days ago)"
    )
    parser.add_argument("--to", dest="end", metavar="TIME", help="the last day or hour (today)")
    parser.add_argument("--tenant", metavar="NAME", help="only of this one")
    parser.add_argument("--key", metavar="NAME", help="only of API keys of this name")
    parser.add_argument("--model", metavar="NAME", help="only of this one")
    add_prices_argument(parser, "to show costs")
    parser.add_argument("--format", choices=("table", "csv", "json"), default="table", help="(table)")
    add_redis_arguments(parser)


async def _show_usage(
    prices: Prices | None, connection: CommandConnection, keys: Keys, arguments: argparse.Namespace
) -> None:
    now = int((await connection.execute("TIME"))[0])
    start, end = usage_span(arguments.start, arguments.end, now)
    query = UsageQuery(
        start=start,
        end=end,
        by=arguments.by,
        tenant=arguments.tenant,
        key_name=arguments.key,
        model=arguments.model,
    )
    usages = await read_usage(connection, keys, query, prices)
    has_costs = prices is not None
    if arguments.format == "json":
        print_json([_as_dict(usage, query, has_costs=has_costs) for usage in usages])
    elif arguments.format == "csv":
        rows = [_as_dict(usage, query, has_costs=has_costs) for usage in usages]
        writer = csv.DictWriter(sys.stdout, list(_as_dict(total_of([]), query, has_costs=has_costs)))
        writer.writeheader()
        writer.writerows(rows)
    elif usages:
        print(_usage_table(usages, query, prices))
    else:
        print("nothing was used in this time")


def _group_names(usage: Usage, query: UsageQuery) -> dict[str, str]:
    """Return the columns that name a group."""
    if query.by is Grouping.KEY:
        return {"tenant": usage.group, "key": usage.name}
    if query.by is Grouping.ADAPTER:
        return {"model": usage.group, "adapter": usage.name}
    return {query.by.value: usage.group}


def _as_dict(usage: Usage, query: UsageQuery, *, has_costs: bool) -> dict[str, object]:
    costs = {"cost": usage.cost} if has_costs else {}
    return {**_group_names(usage, query), **msgspec.structs.asdict(usage.sums), **costs}


def _usage_table(usages: Sequence[Usage], query: UsageQuery, prices: Prices | None) -> str:
    header = [
        *(name.upper() for name in _group_names(usages[0], query)),
        "REQUESTS",
        *(name.upper() for name in _COLUMNS),
    ]
    header += [] if prices is None else [f"COST {prices.currency}".strip()]
    rows = [_usage_row(usage, query, prices) for usage in usages]
    if len(usages) > 1:
        rows.append(_usage_row(total_of(usages), query, prices))
    return format_table(tuple(header), rows)


def _usage_row(usage: Usage, query: UsageQuery, prices: Prices | None) -> tuple[str, ...]:
    counts = [usage.sums.num_requests, *(getattr(usage.sums, name) for name in _COLUMNS)]
    cost = () if prices is None else ("no price" if usage.cost is None else f"{usage.cost:,.4f}",)
    names = (name or "-" for name in _group_names(usage, query).values())
    return (*names, *(f"{count:,}" for count in counts), *cost)


def _run_usage(arguments: argparse.Namespace) -> int:
    run_on_redis(partial(_show_usage, chosen_prices(arguments)), arguments)
    return 0


COMMAND = Command(
    "usage",
    "Show the tokens of tenants, keys, models and adapters, and their costs.",
    run=_run_usage,
    add_arguments=_add_usage_arguments,
)
