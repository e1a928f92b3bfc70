"""``penstock shard``: the Redis servers that hold models, and moves of models between them."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from redis.exceptions import ResponseError

from ....shared.connection import CommandConnection
from ....shared.errors import RedisUnavailableError
from ....shared.keys import Keys
from ....shared.process.command_line import Command, UsageError, add_redis_arguments, format_table
from ....shared.redis_access.check import info_fields
from ....shared.redis_access.embedded import resolve_redis_url
from ....shared.shards import HOME, SHARDS_VARIABLE, ShardMover, check_servers, make_servers, recorded_places
from ....shared.values.shown import format_bytes
from ..command_parts import print_json

_HEADER = ("SHARD", "REDIS", "MEMORY", "MODELS")
AWAY = "away"
ASK_TIMEOUT_S = 5.0

Servers = Mapping[str, CommandConnection]


class _ShardRow(msgspec.Struct, frozen=True):
    """Row of a server. ``memory`` is None if unknown or unreachable; ``moving`` has the target of each move."""

    name: str
    url: str
    version: str
    memory: int | None
    models: list[str]
    moving: dict[str, str]


def _add_shard_list_arguments(parser: argparse.ArgumentParser) -> None:
    add_redis_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one array of shards")


def _add_move_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("to", metavar="SHARD", help="name of a shard, or home")
    add_redis_arguments(parser)


async def _list_shards(servers: Servers, keys: Keys, arguments: argparse.Namespace) -> None:
    places, moving = await recorded_places(servers[HOME], keys), await ShardMover(servers, keys).under_way()
    unknown = {place for place in places.values() if place not in servers}
    states = await asyncio.gather(*(_version_and_memory(name, servers[name]) for name in servers))
    rows = [
        _shard_row(name, servers[name].shown_url, *state, places, moving)
        for name, state in zip(servers, states, strict=True)
    ]
    rows += [_shard_row(name, f"not in {SHARDS_VARIABLE}", "unknown", None, places, moving) for name in sorted(unknown)]
    if arguments.json:
        print_json(rows)
        return
    print(format_table(_HEADER, [_cells(row) for row in rows]))
    for model, target in sorted(moving.items()):
        print(f"model {model} is being moved to {target}; if no process moves it: penstock shard move {model} {target}")


async def _move(servers: Servers, keys: Keys, arguments: argparse.Namespace) -> None:
    if len(servers) == 1:
        raise UsageError(f"no shards are configured; name them with --shards or {SHARDS_VARIABLE}")
    report = await ShardMover(servers, keys).move(arguments.model, arguments.to)
    rest = "; the queue is paused, as it was before" if report.is_paused else ""
    print(f"model {report.model} has moved from {report.source} to {report.target}: {report.num_keys} keys{rest}")


async def _version_and_memory(name: str, server: CommandConnection) -> tuple[str, int | None]:
    """Return the version and the used memory of a server."""
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            fields = info_fields(await server.execute("INFO"))
    except (TimeoutError, RedisUnavailableError):
        return AWAY, None
    except ResponseError:
        return "INFO is forbidden", None
    return fields.get("redis_version", "?"), int(fields["used_memory"])


def _shard_row(
    name: str, url: str, version: str, memory: int | None, places: Mapping[str, str], moving: Mapping[str, str]
) -> _ShardRow:
    models = sorted(model for model, place in places.items() if place == name)
    return _ShardRow(name, url, version, memory, models, {model: moving[model] for model in models if model in moving})


def _cells(row: _ShardRow) -> list[str]:
    models = [f"{model} -> {row.moving[model]}" if model in row.moving else model for model in row.models]
    memory = "-" if row.memory is None else format_bytes(row.memory)
    return [row.name, f"{row.url}, {row.version}", memory, ", ".join(models) or "-"]


def _on_servers(
    work: Callable[[Servers, Keys, argparse.Namespace], Awaitable[None]],
) -> Callable[[argparse.Namespace], int]:
    async def on(url: str, arguments: argparse.Namespace) -> None:
        await check_servers(url, arguments.shards, namespace=arguments.namespace)
        servers = make_servers(url, arguments.shards)
        try:
            await work(servers, Keys(arguments.namespace), arguments)
        finally:
            for server in servers.values():
                await server.close()

    def run(arguments: argparse.Namespace) -> int:
        with resolve_redis_url(arguments.redis_url) as url:
            asyncio.run(on(url, arguments))
        return 0

    return run


COMMAND = Command(
    "shard",
    "The Redis servers that hold models: list them, move a model.",
    subcommands=(
        Command(
            "list",
            "Show home and the shards with their models.",
            run=_on_servers(_list_shards),
            add_arguments=_add_shard_list_arguments,
        ),
        Command(
            "move",
            "Move a model to another shard; its requests wait meanwhile.",
            run=_on_servers(_move),
            add_arguments=_add_move_arguments,
        ),
    ),
)
