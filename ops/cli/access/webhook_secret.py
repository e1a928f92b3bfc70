"""``penstock webhook secret``: secrets that sign a tenant's events."""

from __future__ import annotations

import argparse
import time
from collections.abc import Awaitable, Callable

from ....producer.webhooks.addresses import check_url
from ....producer.webhooks.events import WebhookSecret
from ....producer.webhooks.secrets import KEEP_PREVIOUS_S, SecretStore
from ....shared.connection import CommandConnection
from ....shared.errors import RequestNotFoundError
from ....shared.keys import Keys
from ....shared.process.command_line import Command, add_redis_arguments, format_table
from ...words import format_duration, format_time
from ..broker_command import print_json, run_on_redis

Work = Callable[[SecretStore, argparse.Namespace], Awaitable[None]]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", default="default", help="whose events (default)")
    parser.add_argument(
        "--url",
        default="",
        help="only for this URL; by default for all of the tenant's URLs without their own secret",
    )
    add_redis_arguments(parser)


def _add_create_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--secret", metavar="whsec_…", help="take this one; drawn at random by default")
    _add_arguments(parser)


def _add_rotate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keep-previous",
        type=float,
        default=KEEP_PREVIOUS_S / 3600,
        metavar="H",
        help="hours in which the one before signs, too (24)",
    )
    _add_create_arguments(parser)


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one array, with the secrets themselves")
    add_redis_arguments(parser)


async def _create(secrets: SecretStore, arguments: argparse.Namespace) -> None:
    print((await secrets.create(arguments.tenant, _url(arguments), arguments.secret)).current)


async def _rotate(secrets: SecretStore, arguments: argparse.Namespace) -> None:
    keep_s = arguments.keep_previous * 3600
    secret = await secrets.rotate(arguments.tenant, _url(arguments), arguments.secret, keep_previous_s=keep_s)
    print(secret.current)


async def _show(secrets: SecretStore, arguments: argparse.Namespace) -> None:
    record = await secrets.get(arguments.tenant, _url(arguments))
    if record is None:
        raise _none(arguments)
    print(record.current)


async def _delete(secrets: SecretStore, arguments: argparse.Namespace) -> None:
    if not await secrets.delete(arguments.tenant, _url(arguments)):
        raise _none(arguments)
    print("deleted")


async def _list(secrets: SecretStore, arguments: argparse.Namespace) -> None:
    records = await secrets.list()
    if arguments.json:
        print_json(records)
    elif records:
        print(format_table(("TENANT", "URL", "CREATED", "PREVIOUS SIGNS FOR"), [_row(secret) for secret in records]))
    else:
        print("no tenant has a secret")


def _row(secret: WebhookSecret) -> tuple[str, ...]:
    left_s = secret.previous_until - time.time()
    remaining = format_duration(left_s) if secret.previous and left_s > 0 else "-"
    return (secret.tenant, secret.url or "-", format_time(secret.created_at), remaining)


def _url(arguments: argparse.Namespace) -> str:
    return check_url(arguments.url) if arguments.url else ""


def _none(arguments: argparse.Namespace) -> RequestNotFoundError:
    return RequestNotFoundError(
        f"tenant {arguments.tenant!r} has no such secret; 'penstock webhook secret list' shows all"
    )


def _runner(work: Work) -> Callable[[argparse.Namespace], int]:
    async def on_secrets(connection: CommandConnection, keys: Keys, arguments: argparse.Namespace) -> None:
        await work(SecretStore(connection, keys), arguments)

    def run(arguments: argparse.Namespace) -> int:
        run_on_redis(on_secrets, arguments)
        return 0

    return run


COMMAND = Command(
    "secret",
    "Create, replace and remove secrets that sign events.",
    subcommands=(
        Command("create", "Make one and print it.", run=_runner(_create), add_arguments=_add_create_arguments),
        Command(
            "rotate", "Replace one; both sign for a while.", run=_runner(_rotate), add_arguments=_add_rotate_arguments
        ),
        Command("show", "Print one.", run=_runner(_show), add_arguments=_add_arguments),
        Command("list", "Show who has one.", run=_runner(_list), add_arguments=_add_list_arguments),
        Command("delete", "Remove one.", run=_runner(_delete), add_arguments=_add_arguments),
    ),
)
