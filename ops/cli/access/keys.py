"""``penstock keys`` and ``penstock operator``: API keys of the gateway, and operators' keys for the dashboard."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ....producer.control.secret_keys import KeyStore, OperatorKeys, Role
from ....producer.gateway.auth import ApiKeys
from ....shared.connection import CommandConnection
from ....shared.keys import Keys
from ....shared.process.command_line import EXIT_FAILED, Command, add_redis_arguments, format_table
from ...words import format_time
from ..command_parts import print_json, run_on_redis

Create = Callable[[Any, argparse.Namespace], Awaitable[str]]


@dataclass(frozen=True)
class KeyKind:
    """A kind of keys, as its command shows it.

    Attributes:
        command: name of the command.
        noun: name of one key; an "s" makes the plural.
        store: returns the store of a deployment's keys.
        columns: columns of the table, each with a function of a record.
        fields: fields of a record that JSON contains.
    """

    command: str
    noun: str
    store: Callable[[CommandConnection, Keys], KeyStore[Any]]
    columns: dict[str, Callable[[Any], str]]
    fields: Sequence[str]

    def subcommands(
        self, create: Create, add_create_arguments: Callable[[argparse.ArgumentParser], None]
    ) -> tuple[Command, ...]:
        """Return the subcommands ``create``, ``list`` and ``revoke``.

        Args:
            create: creates a key from the command's arguments, and returns it.
        """
        creation = Command(
            "create",
            "Create a key and print it; it cannot be shown again.",
            run=partial(run_on_redis, partial(self._create, create)),
            add_arguments=add_create_arguments,
        )
        listing = Command(
            "list",
            "Show all keys, without their secrets.",
            run=partial(run_on_redis, self._list),
            add_arguments=_add_key_list_arguments,
        )
        revocation = Command(
            "revoke",
            "Remove a key.",
            run=partial(run_on_redis, self._revoke),
            add_arguments=self._add_revoke_arguments,
        )
        return creation, listing, revocation

    async def _create(
        self, create: Create, connection: CommandConnection, keys: Keys, arguments: argparse.Namespace
    ) -> int:
        print(await create(self.store(connection, keys), arguments))
        return 0

    async def _list(self, connection: CommandConnection, keys: Keys, arguments: argparse.Namespace) -> int:
        records = await self.store(connection, keys).list()
        if arguments.json:
            print_json([{field: getattr(record, field) for field in self.fields} for record in records])
        elif records:
            rows = [[show(record) for show in self.columns.values()] for record in records]
            print(format_table(tuple(self.columns), rows))
        else:
            print(f"no {self.noun}s")
        return 0

    async def _revoke(self, connection: CommandConnection, keys: Keys, arguments: argparse.Namespace) -> int:
        if await self.store(connection, keys).revoke(arguments.key_id):
            print(f"revoked {arguments.key_id}")
            return 0
        print(f"there is no {self.noun} {arguments.key_id}")
        return EXIT_FAILED

    def _add_revoke_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("key_id", metavar="ID", help=f"as `penstock {self.command} list` shows it")
        add_redis_arguments(parser)


def _add_key_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one array")
    add_redis_arguments(parser)


_API_KEYS = KeyKind(
    "keys",
    "API key",
    ApiKeys,
    columns={
        "ID": lambda record: record.key_id,
        "TENANT": lambda record: record.tenant,
        "BAND": lambda record: record.band or "-",
        "CREATED": lambda record: format_time(record.created_at),
        "NAME": lambda record: record.name or "-",
    },
    fields=("key_id", "tenant", "band", "name", "created_at"),
)


def _add_api_key_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", metavar="TENANT", help="tenant of the key's requests")
    parser.add_argument("--band", default="", help="band of requests that name none (the queue's default band)")
    parser.add_argument("--name", default="", help="to know it by in the list")
    add_redis_arguments(parser)


async def _create_api_key(keys: ApiKeys, arguments: argparse.Namespace) -> str:
    key, _ = await keys.create(arguments.tenant, band=arguments.band, name=arguments.name)
    return key


KEYS = Command(
    "keys",
    "Create, list and revoke API keys of the gateway.",
    subcommands=_API_KEYS.subcommands(_create_api_key, _add_api_key_arguments),
)


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


def _add_operator_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the operator, recorded in the audit")
    parser.add_argument(
        "--role",
        choices=list(Role),
        default=Role.VIEWER.value,
        help="viewer looks; operator also pauses, replays, cancels; admin also purges and manages keys (viewer)",
    )
    parser.add_argument("--contents", action="store_true", help="may see prompts and outputs")
    add_redis_arguments(parser)


async def _create_operator_key(keys: OperatorKeys, arguments: argparse.Namespace) -> str:
    key, _ = await keys.create(arguments.name, Role(arguments.role), sees_contents=arguments.contents)
    return key


OPERATOR = Command(
    "operator",
    "Create, list and revoke operators' keys.",
    subcommands=_OPERATORS_KEYS.subcommands(_create_operator_key, _add_operator_arguments),
)
