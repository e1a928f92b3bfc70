"""``penstock queue list``, ``show`` and ``tenants``: waiting requests, their ages and tenants."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import msgspec

from ....producer.control.deployment import unserved_finding
from ....producer.requests.health import may_serve
from ....producer.requests.model_cards import ModelCards
from ....shared.broker import Queue
from ....shared.connection import CommandConnection
from ....shared.deployment.presence import read_heartbeats
from ....shared.errors import RedisUnavailableError, RequestNotFoundError
from ....shared.keys import Keys
from ....shared.partitions import open_queue
from ....shared.process.command_line import Command, UsageError, add_redis_arguments, format_table
from ....shared.queue.policy import TenantPolicy
from ....shared.queue.stats import BandStats, LaneStats, QueueStats, RequestStatus, TenantStats
from ....shared.values.json_lines import encode_line
from ....shared.values.shown import format_number
from ...words import format_duration, format_sheet, format_time, readiness_words
from ..command_parts import OpenModel, on_model, print_json, run_on_redis
from ..watch import WatchFrame, add_watch_argument, watch
from .policy import describe_policy, describe_quotas

PATIENCE_S = 5.0

_LIST_HEADER = ("MODEL", "STATE", "WAITING", "TOKENS", "OLDEST", "RUNNING", "EST. WAIT", "REQ/S", "TOKENS/S")
_BAND_HEADER = ("BAND", "WAITING", "TOKENS", "TENANTS", "OLDEST", "EST. WAIT")
_LANE_HEADER = ("TENANT", "BAND", "WAITING", "TOKENS", "OLDEST", "EST. WAIT")
_TENANT_HEADER = ("TENANT", "WEIGHT", "WAITING", "TOKENS", "OLDEST", "RUNNING", "QUOTAS", "BLOCKED")


def _add_queue_list_arguments(parser: argparse.ArgumentParser) -> None:
    add_redis_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one array of queues, with every field and their bands")


def _add_queue_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--request", metavar="ID", help="show where this request stands instead")
    parser.add_argument(
        "--limit",
        type=_count_argument,
        default=20,
        metavar="N",
        help="tenants' lanes to show, longest queue first (default: 20)",
    )
    add_redis_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one object with every field, and with every tenant")
    add_watch_argument(parser)


def _add_tenants_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="may be left out if only one is known, or served")
    add_redis_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="one array; blocked_for_s is null until one of the tenant's requests ends"
    )


def _count_argument(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be 0 or a positive integer, got {text!r}")
    return int(text)


async def _list_queues(connection: CommandConnection, keys: Keys, arguments: argparse.Namespace) -> None:
    served, awaited = await ModelCards(connection, keys, default=None, wait_for_model=True).read_with_awaited()
    cards = [*served, *awaited]
    replies = await asyncio.gather(*(_stats_soon(connection, keys, name) for name in sorted(cards)))
    reachable = [stats for stats in replies if stats is not None]
    if arguments.json:
        print_json([_queue_fields(stats) for stats in reachable])
    elif replies:
        print(format_table(_LIST_HEADER, [_list_row(stats) for stats in reachable]))
    else:
        print("no models: no worker has served on this Redis yet")
    if away := [name for name, stats in zip(sorted(cards), replies, strict=True) if stats is None]:
        raise RedisUnavailableError(f"the Redis that holds {', '.join(away)} does not answer; see penstock shard list")


async def _stats_soon(connection: CommandConnection, keys: Keys, name: str) -> QueueStats | None:
    """Return the stats of a model; None if one of its Redis servers is unreachable, so that others are still shown."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await (await open_queue(connection, keys, name)).stats()
    except (TimeoutError, RedisUnavailableError):
        return None


async def _show_queue(model: OpenModel, arguments: argparse.Namespace) -> None:
    queue = await model.queue()
    if arguments.request is not None and arguments.watch is not None:
        raise UsageError("give either --request or --watch")
    if arguments.request is not None:
        await _show_request(queue, arguments)
    elif arguments.watch is not None:
        await watch(lambda: _read_queue(model, queue, arguments), arguments.watch, in_lines=arguments.json)
    else:
        print((await _read_queue(model, queue, arguments)).text)


async def _served_by(model: OpenModel, stats: QueueStats) -> str:
    """Return the number of engines that serve the model, or a problem if requests wait for none."""
    engines = await read_heartbeats(model.connection.execute, model.keys)
    finding = unserved_finding(stats, engines, model.served)
    num_engines = sum(engine.model == stats.model and may_serve(engine) for engine in engines)
    return f"{finding.message}; {finding.remedy}" if finding else str(num_engines or "none")


async def _read_queue(model: OpenModel, queue: Queue, arguments: argparse.Namespace) -> WatchFrame:
    stats, policy = await asyncio.gather(queue.stats(tenants=True), queue.policy())
    if arguments.json:
        tenants = [_tenant_fields(tenant) for tenant in stats.tenants]
        line = encode_line({**_queue_fields(stats), "tenants": tenants, "policy": policy})
        return WatchFrame(msgspec.json.format(line).decode(), line.decode())
    # The policy does not change, and would fill most of a small screen.
    settings = "" if arguments.watch is not None else f"\n{describe_policy(policy)}"
    parts = [
        _totals(stats, policy.default_band, await _served_by(model, stats)) + settings,
        format_table(_BAND_HEADER, [_band_row(band) for band in stats.bands]),
    ]
    lanes = [(tenant.tenant, lane) for tenant in stats.tenants for lane in tenant.lanes]
    lanes.sort(key=lambda pair: -pair[1].depth)
    if first_lanes := lanes[: arguments.limit]:
        parts.append(format_table(_LANE_HEADER, [_lane_row(tenant, lane) for tenant, lane in first_lanes]))
    text = "\n\n".join(parts)
    if num_more := len(lanes) - len(first_lanes):
        text += f"\n{num_more} more: --limit {len(lanes)} shows them all"
    return WatchFrame(text, _line(stats))


def _line(stats: QueueStats) -> str:
    """Return the stats in one line, for a log."""
    values = {
        "waiting": str(stats.depth),
        "running": str(stats.num_running),
        "oldest": _age(stats),
        "est wait": format_duration(stats.estimated_wait_s),
        "requests/s": f"{stats.requests_per_s:.1f}",
        "tokens/s": f"{stats.tokens_per_s:.0f}",
    }
    text = ", ".join(f"{name} {value}" for name, value in values.items())
    return f"{format_time(time.time())} {stats.model} {_state(stats)}: {text}"


async def _show_request(queue: Queue, arguments: argparse.Namespace) -> None:
    status = await queue.status(arguments.request)
    if status is None:
        raise RequestNotFoundError(
            f"model {arguments.model!r} has no request {arguments.request!r}, or its result has expired"
        )
    if arguments.json:
        print_json(status)
    else:
        print(_request_sheet(status))


async def _tenants(model: OpenModel, arguments: argparse.Namespace) -> None:
    queue = await model.queue()
    stats, policy, own = await asyncio.gather(queue.stats(tenants=True), queue.policy(), queue.tenant_policies())
    active = {tenant.tenant for tenant in stats.tenants}
    tenants = [*stats.tenants, *(_idle(tenant, own[tenant]) for tenant in sorted(own.keys() - active))]
    if arguments.json:
        rows = [
            {
                **_tenant_fields(tenant),
                "policy": own.get(tenant.tenant, policy.tenant),
                "has_own_policy": tenant.tenant in own,
            }
            for tenant in tenants
        ]
        print_json(rows)
    elif tenants:
        rows = [_tenant_row(tenant, own.get(tenant.tenant, policy.tenant)) for tenant in tenants]
        print(format_table(_TENANT_HEADER, rows))
    else:
        print("no tenants: no requests wait or run, and no tenant has its own policy")


def _idle(tenant: str, policy: TenantPolicy) -> TenantStats:
    return TenantStats(tenant=tenant, weight=policy.weight, num_running=0, blocked_for_s=0.0, lanes=[])


def _totals(stats: QueueStats, default_band: str, engines: str) -> str:
    waiting = str(stats.depth)
    if stats.num_returned:
        waiting += f", {stats.num_returned} of them to resume after their last token"
    if stats.num_awaiting_input:
        waiting += f"; {stats.num_awaiting_input} more await input"
    wait = format_duration(stats.estimated_wait_s)
    rates = f"{stats.requests_per_s:.1f} requests/s, {stats.tokens_per_s:.0f} tokens/s"
    lines = {
        "model": stats.model,
        "state": _state(stats) if stats.paused_at is None else f"paused since {format_time(stats.paused_at)}",
        "engines": engines,
        "readiness": readiness_words(stats.readiness),
        "waiting": waiting,
        "tokens": f"{stats.num_tokens} of what never ran, prompts and max_tokens",
        "oldest": _age(stats),
        "running": str(stats.num_running),
        "est wait": wait if wait == "-" else f"about {wait} in band {default_band}",
        "warm": _warm(stats),
        "served": f"{rates}, {stats.mean_output_tokens:.0f} tokens of output each" if stats.requests_per_s else "-",
    }
    return format_sheet(lines)


def _warm(stats: QueueStats) -> str:
    if not stats.num_warm:
        return "-"
    share = stats.num_warm_kept / stats.num_warm
    return f"{share:.0%} of {stats.num_warm} requests went to the engine that had their conversation"


def _request_sheet(status: RequestStatus) -> str:
    position = "-"
    if status.position is not None:
        position = f"at most {status.position} before it in its line" if status.position else "the next of its line"
    deadline = "-"
    if status.deadline is not None:
        left_s = status.deadline - time.time()
        distance = f"in {format_duration(left_s)}" if left_s > 0 else f"{format_duration(-left_s)} ago"
        at = format_time(status.deadline)
        deadline = f"{at}, {distance}"
    wait = format_duration(status.estimated_start_s)
    lines = {
        "request": status.request_id,
        "state": status.state,
        "tenant": f"{status.tenant}, band {status.band}",
        "position": position,
        "est start": wait if wait == "-" else f"in about {wait}",
        "deadline": deadline,
        "engine": status.engine_id or "-",
        "attempts": str(status.num_attempts),
        "tokens": f"{status.num_output_tokens} of output",
    }
    return format_sheet(lines)


def _list_row(stats: QueueStats) -> list[str]:
    return [
        stats.model,
        _state(stats),
        str(stats.depth),
        str(stats.num_tokens),
        _age(stats),
        str(stats.num_running),
        format_duration(stats.estimated_wait_s),
        f"{stats.requests_per_s:.1f}",
        f"{stats.tokens_per_s:.0f}",
    ]


def _band_row(band: BandStats) -> list[str]:
    sums = [str(band.depth), str(band.num_tokens), str(band.num_tenants)]
    return [band.band, *sums, _age(band), format_duration(band.estimated_wait_s)]


def _lane_row(tenant: str, lane: LaneStats) -> list[str]:
    wait = format_duration(lane.estimated_wait_s)
    return [tenant, lane.band, str(lane.depth), str(lane.num_tokens), _age(lane), wait]


def _tenant_row(tenant: TenantStats, policy: TenantPolicy) -> list[str]:
    oldest_age_s = max((lane.oldest_age_s for lane in tenant.lanes), default=None)
    return [
        tenant.tenant,
        format_number(tenant.weight),
        str(tenant.depth),
        str(sum(lane.num_tokens for lane in tenant.lanes)),
        format_duration(oldest_age_s),
        str(tenant.num_running),
        describe_quotas(policy) or "-",
        "until one ends" if tenant.blocked_for_s == float("inf") else format_duration(tenant.blocked_for_s or None),
    ]


def _state(stats: QueueStats) -> str:
    return "paused" if stats.is_paused else "open"


def _age(stats: QueueStats | BandStats | LaneStats) -> str:
    """Return the age of the oldest request that may start; 0 if there is none. Requests over quota do not count."""
    return format_duration(stats.oldest_age_s or None)


def _queue_fields(stats: QueueStats) -> dict[str, Any]:
    fields = msgspec.structs.asdict(stats)
    del fields["tenants"]
    return fields


def _tenant_fields(tenant: TenantStats) -> dict[str, Any]:
    return {**msgspec.structs.asdict(tenant), "depth": tenant.depth}


def _run_list(arguments: argparse.Namespace) -> int:
    run_on_redis(_list_queues, arguments)
    return 0


LIST = Command("list", "Show the queues of all models.", run=_run_list, add_arguments=_add_queue_list_arguments)
SHOW = Command(
    "show",
    "Show one queue with its policy, bands and tenants, or where one request stands.",
    run=on_model(_show_queue),
    add_arguments=_add_queue_arguments,
)
TENANTS = Command(
    "tenants",
    "Show tenants with their weights, load and quotas, longest queue first.",
    run=on_model(_tenants),
    add_arguments=_add_tenants_arguments,
)
