"""``penstock webhook``: events that were delivered, wait or were given up, and the secrets that sign them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Awaitable, Callable

from ....producer.background.agenda import Agenda
from ....producer.control.operations import Operations
from ....producer.webhooks.addresses import check_url
from ....producer.webhooks.event_store import EventStore
from ....producer.webhooks.events import EventState, WebhookAttempt, WebhookEvent, WebhookSecret
from ....producer.webhooks.secrets import KEEP_PREVIOUS_S, SecretStore
from ....shared.connection import CommandConnection
from ....shared.errors import RequestNotFoundError
from ....shared.keys import Keys
from ....shared.process.command_line import Command, UsageError, add_redis_arguments, format_table
from ....shared.values.shown import mask_url
from ...words import format_duration, format_sheet, format_time
from ..command_parts import print_json, run_on_redis

SecretWork = Callable[[SecretStore, argparse.Namespace], Awaitable[None]]
_HEADER = ("EVENT", "TYPE", "STATE", "CREATED", "ATTEMPTS", "NEXT", "URL", "LAST ERROR")
_MAX_ERROR_CHARS = 60
EventWork = Callable[[EventStore, Operations, argparse.Namespace], Awaitable[None]]


def _add_tenant_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", default="default", help="whose events (default)")
    parser.add_argument(
        "--url",
        default="",
        help="only for this URL; by default for all of the tenant's URLs without their own secret",
    )
    add_redis_arguments(parser)


def _add_create_secret_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--secret", metavar="whsec_…", help="take this one; drawn at random by default")
    _add_tenant_argument(parser)


def _add_rotate_secret_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keep-previous",
        type=float,
        default=KEEP_PREVIOUS_S / 3600,
        metavar="H",
        help="hours in which the one before signs, too (24)",
    )
    _add_create_secret_arguments(parser)


def _add_secret_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one array, with the secrets themselves")
    add_redis_arguments(parser)


async def _create_secret(secrets: SecretStore, arguments: argparse.Namespace) -> None:
    print((await secrets.create(arguments.tenant, _secret_url(arguments), arguments.secret)).current)


async def _rotate_secret(secrets: SecretStore, arguments: argparse.Namespace) -> None:
    keep_s = arguments.keep_previous * 3600
    secret = await secrets.rotate(arguments.tenant, _secret_url(arguments), arguments.secret, keep_previous_s=keep_s)
    print(secret.current)


async def _show_secret(secrets: SecretStore, arguments: argparse.Namespace) -> None:
    record = await secrets.get(arguments.tenant, _secret_url(arguments))
    if record is None:
        raise _no_secret(arguments)
    print(record.current)


async def _delete_secret(secrets: SecretStore, arguments: argparse.Namespace) -> None:
    if not await secrets.delete(arguments.tenant, _secret_url(arguments)):
        raise _no_secret(arguments)
    print("deleted")


async def _list_secrets(secrets: SecretStore, arguments: argparse.Namespace) -> None:
    records = await secrets.list()
    if arguments.json:
        print_json(records)
    elif records:
        print(
            format_table(
                ("TENANT", "URL", "CREATED", "PREVIOUS SIGNS FOR"), [_secret_row(secret) for secret in records]
            )
        )
    else:
        print("no tenant has a secret")


def _secret_row(secret: WebhookSecret) -> tuple[str, ...]:
    left_s = secret.previous_until - time.time()
    remaining = format_duration(left_s) if secret.previous and left_s > 0 else "-"
    return (secret.tenant, secret.url or "-", format_time(secret.created_at), remaining)


def _secret_url(arguments: argparse.Namespace) -> str:
    return check_url(arguments.url) if arguments.url else ""


def _no_secret(arguments: argparse.Namespace) -> RequestNotFoundError:
    return RequestNotFoundError(
        f"tenant {arguments.tenant!r} has no such secret; 'penstock webhook secret list' shows all"
    )


def _runner_on_secrets(work: SecretWork) -> Callable[[argparse.Namespace], int]:
    async def on_secrets(connection: CommandConnection, keys: Keys, arguments: argparse.Namespace) -> None:
        await work(SecretStore(connection, keys), arguments)

    def run(arguments: argparse.Namespace) -> int:
        run_on_redis(on_secrets, arguments)
        return 0

    return run


SECRET = Command(
    "secret",
    "Create, replace and remove secrets that sign events.",
    subcommands=(
        Command(
            "create",
            "Make one and print it.",
            run=_runner_on_secrets(_create_secret),
            add_arguments=_add_create_secret_arguments,
        ),
        Command(
            "rotate",
            "Replace one; both sign for a while.",
            run=_runner_on_secrets(_rotate_secret),
            add_arguments=_add_rotate_secret_arguments,
        ),
        Command("show", "Print one.", run=_runner_on_secrets(_show_secret), add_arguments=_add_tenant_argument),
        Command(
            "list", "Show who has one.", run=_runner_on_secrets(_list_secrets), add_arguments=_add_secret_list_arguments
        ),
        Command("delete", "Remove one.", run=_runner_on_secrets(_delete_secret), add_arguments=_add_tenant_argument),
    ),
)


def _add_event_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state", choices=list(EventState), help="only those; all by default")
    parser.add_argument("--json", action="store_true", help="one array of events, with every field")
    add_redis_arguments(parser)


def _add_event_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("event_id", metavar="EVENT")
    parser.add_argument("--json", action="store_true", help="one object with every field")
    add_redis_arguments(parser)


def _add_choice_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("event_id", metavar="EVENT", nargs="?")
    parser.add_argument("--dead", action="store_true", help="all that were given up")
    add_redis_arguments(parser)


async def _list_events(store: EventStore, _: Operations, arguments: argparse.Namespace) -> None:
    states = [EventState(arguments.state)] if arguments.state else list(EventState)
    events = [event for state in states for event in await store.list(state)]
    if arguments.json:
        print_json(events)
    elif events:
        print(format_table(_HEADER, [_event_row(event) for event in events]))
    else:
        print("there are no events")


async def _show_event(store: EventStore, _: Operations, arguments: argparse.Namespace) -> None:
    event = await store.show(arguments.event_id)
    if arguments.json:
        print_json(event)
        return
    fields = {
        "event": event.event_id,
        "type": event.type,
        "state": event.state,
        "url": mask_url(event.url),
        "tenant": event.tenant,
        "created": format_time(event.created_at),
        "next": _next_attempt(event),
        "body": event.body,
    }
    print(format_sheet(fields))
    for attempt in event.attempts:
        print(f"  {format_time(attempt.at)}  {format_duration(attempt.duration_s)}  {_outcome(attempt)}")


async def _replay_events(store: EventStore, operations: Operations, arguments: argparse.Namespace) -> None:
    for event_id in await _chosen(store, arguments):
        await operations.replay_webhook(event_id)
        print(f"{event_id} is delivered again under the same id")


async def _purge_events(store: EventStore, operations: Operations, arguments: argparse.Namespace) -> None:
    purged = [await operations.purge_webhook(event_id) for event_id in await _chosen(store, arguments)]
    if not arguments.dead and not any(purged):
        raise RequestNotFoundError(f"no webhook event {arguments.event_id!r} is known")
    print(f"{sum(purged)} purged")


async def _chosen(store: EventStore, arguments: argparse.Namespace) -> list[str]:
    if arguments.dead == (arguments.event_id is not None):
        raise UsageError("give either an EVENT or --dead, which means every event that was given up")
    if not arguments.dead:
        return [arguments.event_id]
    return [event.event_id for event in await store.list(EventState.DEAD)]


def _event_row(event: WebhookEvent) -> tuple[str, ...]:
    error = event.attempts[-1].error if event.attempts else ""
    return (
        event.event_id,
        event.type,
        event.state,
        format_time(event.created_at),
        str(event.num_attempts),
        _next_attempt(event),
        mask_url(event.url),
        (error if len(error) <= _MAX_ERROR_CHARS else error[: _MAX_ERROR_CHARS - 1] + "…") or "-",
    )


def _next_attempt(event: WebhookEvent) -> str:
    if event.state is not EventState.PENDING:
        return "-"
    left_s = event.next_attempt_at - time.time()
    return f"in {format_duration(left_s)}" if left_s > 0 else "now"


def _outcome(attempt: WebhookAttempt) -> str:
    return attempt.error or f"status {attempt.status}"


def _runner_on_events(work: EventWork) -> Callable[[argparse.Namespace], int]:
    async def on_events(connection: CommandConnection, keys: Keys, arguments: argparse.Namespace) -> None:
        store = EventStore(connection, keys, Agenda(connection, keys))
        await work(store, Operations(connection, keys), arguments)

    def run(arguments: argparse.Namespace) -> int:
        run_on_redis(on_events, arguments)
        return 0

    return run


COMMAND = Command(
    "webhook",
    "List webhook events, deliver them again, and manage the secrets that sign them.",
    subcommands=(
        Command(
            "list",
            "Show events, oldest first.",
            run=_runner_on_events(_list_events),
            add_arguments=_add_event_list_arguments,
        ),
        Command(
            "show",
            "Show one with its attempts.",
            run=_runner_on_events(_show_event),
            add_arguments=_add_event_arguments,
        ),
        Command("replay", "Deliver again.", run=_runner_on_events(_replay_events), add_arguments=_add_choice_arguments),
        Command("purge", "Throw away.", run=_runner_on_events(_purge_events), add_arguments=_add_choice_arguments),
        SECRET,
    ),
)
