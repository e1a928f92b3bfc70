"""``worker list``: the engines of a deployment, their hosts, state and load.

With ``--plugins``: the installed plug-ins for options of worker and gateway. It reads metadata and loads no plug-in.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import msgspec

from ...shared.connection import checked_connection
from ...shared.deployment.orders import read_drains
from ...shared.deployment.presence import read_devices, read_heartbeats
from ...shared.deployment.records import UNREADABLE, EngineHeartbeat, EngineSetup
from ...shared.keys import Keys
from ...shared.messages.core import GroupStatus
from ...shared.messages.devices import DeviceRecord
from ...shared.messages.supervision import EngineState
from ...shared.process.command_line import Command, add_redis_arguments, format_table
from ...shared.process.plugins import OPTION_OF_GROUP, plugins_of
from ...shared.redis_access.embedded import resolve_redis_url
from ...shared.values.shown import format_bytes
from .models import format_devices

_LOAD_HEADER = (
    "WORKER",
    "ENGINE",
    "MODEL",
    "DEVICE",
    "STATE",
    "PIDS",
    "RUN/WAIT",
    "KV",
    "STEP",
    "TOKENS/S",
    "RSS",
    "GPU MEM",
)
_SETUP_HEADER = ("RANKS", "RUNS", "RESUME", "ADAPTERS", "GUESSES", "GROUP", "WEIGHTS")
_HEADER = _LOAD_HEADER + _SETUP_HEADER
_PLUGINS_HEADER = ("OPTION", "NAME", "IS", "DISTRIBUTION")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_redis_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one array of heartbeats, with every field")
    parser.add_argument(
        "--plugins",
        action="store_true",
        help="list what is installed here for options of `worker start` and `gateway` instead",
    )


def _show_engines(arguments: argparse.Namespace) -> int:
    if arguments.plugins:
        return list_plugins(as_json=arguments.json)
    with resolve_redis_url(arguments.redis_url) as url:
        heartbeats, devices, unreadable = asyncio.run(_read_deployment(url, arguments.namespace))
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(heartbeats)).decode())
    elif heartbeats:
        print(format_table(_HEADER, [_row(heartbeat) for heartbeat in heartbeats]))
        for heartbeat in heartbeats:
            if heartbeat.state is EngineState.DEAD:
                print(_describe_death(heartbeat))
        for drain in read_drains(heartbeats, time.time()):
            print(drain)
    elif not (unreadable or devices):
        print("no workers")
    if devices and not arguments.json:
        print(format_devices(devices))
    for engine_id in unreadable:
        print(f"{engine_id}: {UNREADABLE}", file=sys.stderr if arguments.json else sys.stdout)
    return 0


async def _read_deployment(url: str, namespace: str) -> tuple[list[EngineHeartbeat], list[DeviceRecord], list[str]]:
    """Return the heartbeats, devices with several models, and the ids of engines whose heartbeats cannot be read."""
    unreadable: list[str] = []
    async with checked_connection(url, namespace=namespace) as connection:
        heartbeats = await read_heartbeats(connection.execute, Keys(namespace), unreadable=unreadable)
        return heartbeats, await read_devices(connection.execute, Keys(namespace)), unreadable


def _row(beat: EngineHeartbeat) -> list[str]:
    return [
        beat.worker_id,
        beat.engine_id.removeprefix(beat.worker_id + "-"),
        beat.model,
        f"{beat.device} {beat.setup.kernel_instructions}".rstrip() if beat.setup is not None else beat.device,
        beat.state_words,
        f"{beat.supervisor_pid}/{beat.worker_pid}/{beat.core_pid or '-'}",
        f"{beat.num_running_reqs}/{beat.num_waiting_reqs}",
        f"{beat.kv_cache_usage:.0%}",
        str(beat.step_counter),
        f"{beat.tokens_per_s:.0f}",
        format_bytes(beat.worker_rss_bytes + beat.core_rss_bytes),
        format_bytes(beat.device_memory_bytes) if beat.device_memory_bytes else "-",
        _ranks(beat.setup) if beat.setup is not None else "-",
        *((_software(beat.setup), beat.setup.resume) if beat.setup is not None else ("-", "-")),
        str(len(beat.lora_digests)) if beat.setup is not None and beat.setup.lora is not None else "-",
        _drafting(beat.setup) if beat.setup is not None else "-",
        _place(beat.group) if beat.group is not None else "-",
        beat.weights_version or "-",
    ]


def _software(setup: EngineSetup) -> str:
    """Return the engine with its version: "penstock 0.2.0"."""
    return f"{setup.engine} {setup.versions.get(setup.engine, '')}".rstrip()


def _ranks(setup: EngineSetup) -> str:
    """Return the ranks, and the size of weights and KV cache of the largest one: "tp 2, 5.1 GiB each"."""
    ranks = setup.ranks
    if ranks is None:
        return "-"
    sizes = map(sum, zip(ranks.weight_bytes, ranks.kv_cache_bytes, strict=True))
    return f"{ranks.describe()}, {format_bytes(max(sizes, default=0))} each"


def _drafting(setup: EngineSetup) -> str:
    """Return the drafting method and the rows of a step for drafts, including the requests' own: "ngram/16"."""
    return f"{setup.speculative}/{setup.num_free_rows}" if setup.num_free_rows else "-"


def _place(group: GroupStatus) -> str:
    """Return group, rank and wave: "host-0 1/2, wave 7 running"."""
    return f"{group.group} {group.rank}/{group.size}, wave {group.wave} {group.phase}"


def _describe_death(beat: EngineHeartbeat) -> str:
    if not beat.restart_at:
        return f"{beat.engine_id} is dead: {beat.error}"
    return f"{beat.engine_id} is dead, restarts in {max(0.0, beat.restart_at - time.time()):.0f} s: {beat.error}"


COMMAND = Command("list", "Show engines, their state and load.", run=_show_engines, add_arguments=_add_arguments)


def list_plugins(*, as_json: bool) -> int:
    """Print the plug-ins that each option may name."""
    rows = [
        (option, name, point.value, "" if point.dist is None else f"{point.dist.name} {point.dist.version}")
        for group, option in OPTION_OF_GROUP.items()
        for name, points in plugins_of(group).items()
        for point in points
    ]
    if as_json:
        objects = [dict(zip(("option", "name", "value", "distribution"), row, strict=True)) for row in rows]
        print(msgspec.json.format(msgspec.json.encode(objects)).decode())
    elif rows:
        print(format_table(_PLUGINS_HEADER, [list(row) for row in rows]))
    else:
        print("no plug-ins")
    return 0
