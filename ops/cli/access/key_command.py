"""Common parts of `penstock keys` and `penstock operator`, which list and revoke keys alike."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ....producer.control.secret_keys import KeyStore
from ....shared.connection import CommandConnection
from ....shared.keys import Keys
from ....shared.process.command_line import EXIT_FAILED, Command, add_redis_arguments, format_table
from ..broker_command import print_json, run_on_redis

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
            add_arguments=_add_list_arguments,
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


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one array")
    add_redis_arguments(parser)
