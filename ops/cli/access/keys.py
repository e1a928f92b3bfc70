"""``penstock keys``: API keys of the gateway, and their tenants."""

from __future__ import annotations

import argparse

from ....producer.gateway.auth import ApiKeys
from ....shared.process.command_line import Command, add_redis_arguments
from ...words import format_time
from .key_command import KeyKind

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


def _add_create_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", metavar="TENANT", help="tenant of the key's requests")
    parser.add_argument("--band", default="", help="band of requests that name none (the queue's default band)")
    parser.add_argument("--name", default="", help="to know it by in the list")
    add_redis_arguments(parser)


async def _create(keys: ApiKeys, arguments: argparse.Namespace) -> str:
    key, _ = await keys.create(arguments.tenant, band=arguments.band, name=arguments.name)
    return key


COMMAND = Command(
    "keys",
    "Create, list and revoke API keys of the gateway.",
    subcommands=_API_KEYS.subcommands(_create, _add_create_arguments),
)
