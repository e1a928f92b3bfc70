"""``penstock operator``: operators' keys for the dashboard."""

from __future__ import annotations

import argparse

from ....producer.control.secret_keys import OperatorKeys, Role
from ....shared.process.command_line import Command, add_redis_arguments
from ...words import format_time
from .key_command import KeyKind

_OPERATORS_KEYS = KeyKind(
    "operator",
    "operator's key",
    OperatorKeys,
    columns={
        "ID": lambda record: record.key_id,
        "NAME": lambda record: record.name,
        "ROLE": lambda record: record.role,
        "CONTENTS": lambda record: "yes" if record.sees_contents else "no",
        "CREATED": lambda record: format_time(record.created_at),
    },
    fields=("key_id", "name", "role", "sees_contents", "created_at"),
)


def _add_create_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the operator, recorded in the audit")
    parser.add_argument(
        "--role",
        choices=list(Role),
        default=Role.VIEWER.value,
        help="viewer looks; operator also pauses, replays, cancels; admin also purges and manages keys (viewer)",
    )
    parser.add_argument("--contents", action="store_true", help="may see prompts and outputs")
    add_redis_arguments(parser)


async def _create(keys: OperatorKeys, arguments: argparse.Namespace) -> str:
    key, _ = await keys.create(arguments.name, Role(arguments.role), sees_contents=arguments.contents)
    return key


COMMAND = Command(
    "operator",
    "Create, list and revoke operators' keys.",
    subcommands=_OPERATORS_KEYS.subcommands(_create, _add_create_arguments),
)
