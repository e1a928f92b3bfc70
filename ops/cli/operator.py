"""``penstock operator``: keys of the people who run a deployment, for the dashboard."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from functools import partial

from ...producer.operator_keys import OperatorKeys, Role
from ...shared.command_line import EXIT_FAILED, Command, add_redis_arguments, format_table
from ...shared.connection import CommandConnection
from ...shared.keys import Keys
from ..words import format_time
from .broker_command import print_json, run_on_redis

_HEADER = ("ID", "NAME", "ROLE", "CONTENTS", "CREATED")
Work = Callable[[OperatorKeys, argparse.Namespace], Awaitable[int]]


def _add_create_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="whose key it is; it stands in the audit")
    parser.add_argument(
        "--role",
        choices=list(Role),
        default=Role.VIEWER.value,
        help="viewer looks; operator also pauses, replays, cancels; admin also purges and manages keys (viewer)",
    )
    parser.add_argument("--contents", action="store_true", help="may see prompts and outputs")
    add_redis_arguments(parser)


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one array")
    add_redis_arguments(parser)


def _add_revoke_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key_id", metavar="ID", help="as `penstock operator list` shows it")
    add_redis_arguments(parser)


async def _create(keys: OperatorKeys, arguments: argparse.Namespace) -> int:
    key, _ = await keys.create(arguments.name, Role(arguments.role), sees_contents=arguments.contents)
    print(key)
    return 0


async def _list(keys: OperatorKeys, arguments: argparse.Namespace) -> int:
    records = await keys.list()
    if arguments.json:
        fields = ("key_id", "name", "role", "sees_contents", "created_at")
        print_json([{field: getattr(record, field) for field in fields} for record in records])
    elif records:
        rows = [
            (one.key_id, one.name, one.role, "yes" if one.sees_contents else "no", format_time(one.created_at))
            for one in records
        ]
        print(format_table(_HEADER, rows))
    else:
        print("no operators' keys")
    return 0


async def _revoke(keys: OperatorKeys, arguments: argparse.Namespace) -> int:
    if await keys.revoke(arguments.key_id):
        print(f"revoked {arguments.key_id}")
        return 0
    print(f"there is no operator's key {arguments.key_id}")
    return EXIT_FAILED


def _on_keys(work: Work) -> Callable[[argparse.Namespace], int]:
    async def run(connection: CommandConnection, keys: Keys, arguments: argparse.Namespace) -> int:
        return await work(OperatorKeys(connection, keys), arguments)

    return partial(run_on_redis, run)


COMMAND = Command(
    "operator",
    "Make, list and revoke operators' keys.",
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
