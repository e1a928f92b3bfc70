"""``penstock keys``: API keys of the gateway, and whose they are."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from functools import partial

from ...producer.gateway.api_keys import ApiKeys
from ...shared.command_line import EXIT_FAILED, Command, add_redis_arguments, format_table
from ...shared.connection import CommandConnection
from ...shared.keys import Keys
from ..words import format_time
from .broker_command import print_json, run_on_redis

_HEADER = ("ID", "TENANT", "BAND", "CREATED", "NAME")
Work = Callable[[ApiKeys, argparse.Namespace], Awaitable[int]]


def _add_create_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", metavar="TENANT", help="on whose account its requests run")
    parser.add_argument("--band", default="", help="of requests that name none; the queue's default band otherwise")
    parser.add_argument("--name", default="", help="to know it by in the list")
    add_redis_arguments(parser)


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one array")
    add_redis_arguments(parser)


def _add_revoke_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key_id", metavar="ID", help="as `penstock keys list` shows it")
    add_redis_arguments(parser)


async def _create(keys: ApiKeys, arguments: argparse.Namespace) -> int:
    key, _ = await keys.create(arguments.tenant, band=arguments.band, name=arguments.name)
    print(key)
    return 0


async def _list(keys: ApiKeys, arguments: argparse.Namespace) -> int:
    records = await keys.list()
    rows = [
        (record.key_id, record.tenant, record.band or "-", format_time(record.created_at), record.name or "-")
        for record in records
    ]
    if arguments.json:
        fields = ("key_id", "tenant", "band", "name", "created_at")
        print_json([{field: getattr(record, field) for field in fields} for record in records])
    elif rows:
        print(format_table(_HEADER, rows))
    else:
        print("no API keys")
    return 0


async def _revoke(keys: ApiKeys, arguments: argparse.Namespace) -> int:
    if await keys.revoke(arguments.key_id):
        print(f"revoked {arguments.key_id}")
        return 0
    print(f"there is no API key {arguments.key_id}")
    return EXIT_FAILED


def _on_keys(work: Work) -> Callable[[argparse.Namespace], int]:
    """The command that does ``work`` on the keys of the deployment that its arguments name."""

    async def run(connection: CommandConnection, keys: Keys, arguments: argparse.Namespace) -> int:
        return await work(ApiKeys(connection, keys), arguments)

    return partial(run_on_redis, run)


COMMAND = Command(
    "keys",
    "Make, list and revoke API keys of the gateway.",
    subcommands=(
        Command(
            "create",
            "Make a key and print it; it cannot be shown again.",
            run=_on_keys(_create),
            add_arguments=_add_create_arguments,
        ),
        Command(
            "list", "Show all keys, without their secrets.", run=_on_keys(_list), add_arguments=_add_list_arguments
        ),
        Command("revoke", "Remove a key.", run=_on_keys(_revoke), add_arguments=_add_revoke_arguments),
    ),
)
