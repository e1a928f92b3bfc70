"""``penstock audit``: changes by operators."""

from __future__ import annotations

import argparse

from ....shared.connection import CommandConnection
from ....shared.deployment.audit import MAX_READ, Audit, AuditEntry
from ....shared.keys import Keys
from ....shared.process.command_line import Command, add_redis_arguments, format_table
from ...words import format_time
from ..command_parts import print_json, run_on_redis

_HEADER = ("TIME", "WHO", "BY", "KNOWN BY", "REDIS USER", "FROM", "ACTION", "TARGET", "RESULT", "DETAILS")


def _add_audit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, default=100, metavar="N", help=f"the newest N, up to {MAX_READ} (100)")
    parser.add_argument("--actor", metavar="NAME", help="only of this one")
    parser.add_argument("--action", metavar="NAME", help="only these, as queue.pause, or queue for all of its kind")
    parser.add_argument("--json", action="store_true", help="one array, with every field")
    add_redis_arguments(parser)


async def _audit(connection: CommandConnection, keys: Keys, arguments: argparse.Namespace) -> None:
    entries = await Audit(connection, keys).read(limit=max(1, arguments.limit))
    matching = [entry for entry in entries if _matches(entry, arguments)]
    if arguments.json:
        print_json(matching)
    elif matching:
        print(format_table(_HEADER, [_entry_row(entry) for entry in matching]))
    else:
        print("no changes are recorded")


def _matches(entry: AuditEntry, arguments: argparse.Namespace) -> bool:
    kinds = (entry.action, entry.action.partition(".")[0])
    return arguments.actor in (None, entry.actor) and (arguments.action is None or arguments.action in kinds)


def _entry_row(entry: AuditEntry) -> tuple[str, ...]:
    details = " ".join(f"{name}={value}" for name, value in entry.details.items())
    at = format_time(entry.at)
    identity = (entry.source or "-", entry.redis_user or "-")
    return at, entry.actor, entry.via, *identity, entry.address, entry.action, entry.target, entry.result, details


def _run_audit(arguments: argparse.Namespace) -> int:
    run_on_redis(_audit, arguments)
    return 0


COMMAND = Command(
    "audit", "Show changes by operators, newest first.", run=_run_audit, add_arguments=_add_audit_arguments
)
