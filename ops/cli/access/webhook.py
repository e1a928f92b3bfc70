"""``penstock webhook``: events that were delivered, wait or were given up, and the secrets that sign them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Awaitable, Callable

from ....producer.background.agenda import Agenda
from ....producer.control.operations import Operations
from ....producer.webhooks.event_store import EventStore
from ....producer.webhooks.events import EventState, WebhookAttempt, WebhookEvent
from ....shared.connection import CommandConnection
from ....shared.errors import RequestNotFoundError
from ....shared.keys import Keys
from ....shared.process.command_line import Command, UsageError, add_redis_arguments, format_table
from ....shared.values.shown import mask_url
from ...words import format_duration, format_sheet, format_time
from ..broker_command import print_json, run_on_redis
from . import webhook_secret

_HEADER = ("EVENT", "TYPE", "STATE", "CREATED", "ATTEMPTS", "NEXT", "URL", "LAST ERROR")
_MAX_ERROR_CHARS = 60

Work = Callable[[EventStore, Operations, argparse.Namespace], Awaitable[None]]


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state", choices=list(EventState), help="only those; all by default")
    parser.add_argument("--json", action="store_true", help="one array of events, with every field")
    add_redis_arguments(parser)


def _add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("event_id", metavar="EVENT")
    parser.add_argument("--json", action="store_true", help="one object with every field")
    add_redis_arguments(parser)


def _add_choice_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("event_id", metavar="EVENT", nargs="?")
    parser.add_argument("--dead", action="store_true", help="all that were given up")
    add_redis_arguments(parser)


async def _list(store: EventStore, _: Operations, arguments: argparse.Namespace) -> None:
    states = [EventState(arguments.state)] if arguments.state else list(EventState)
    events = [event for state in states for event in await store.list(state)]
    if arguments.json:
        print_json(events)
    elif events:
        print(format_table(_HEADER, [_row(event) for event in events]))
    else:
        print("there are no events")


async def _show(store: EventStore, _: Operations, arguments: argparse.Namespace) -> None:
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
        "next": _next(event),
        "body": event.body,
    }
    print(format_sheet(fields))
    for attempt in event.attempts:
        print(f"  {format_time(attempt.at)}  {format_duration(attempt.duration_s)}  {_outcome(attempt)}")


async def _replay(store: EventStore, operations: Operations, arguments: argparse.Namespace) -> None:
    for event_id in await _chosen(store, arguments):
        await operations.replay_webhook(event_id)
        print(f"{event_id} is delivered again under the same id")


async def _purge(store: EventStore, operations: Operations, arguments: argparse.Namespace) -> None:
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


def _row(event: WebhookEvent) -> tuple[str, ...]:
    error = event.attempts[-1].error if event.attempts else ""
    return (
        event.event_id,
        event.type,
        event.state,
        format_time(event.created_at),
        str(event.num_attempts),
        _next(event),
        mask_url(event.url),
        (error if len(error) <= _MAX_ERROR_CHARS else error[: _MAX_ERROR_CHARS - 1] + "…") or "-",
    )


def _next(event: WebhookEvent) -> str:
    if event.state is not EventState.PENDING:
        return "-"
    left_s = event.next_attempt_at - time.time()
    return f"in {format_duration(left_s)}" if left_s > 0 else "now"


def _outcome(attempt: WebhookAttempt) -> str:
    return attempt.error or f"status {attempt.status}"


def _runner(work: Work) -> Callable[[argparse.Namespace], int]:
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
        Command("list", "Show events, oldest first.", run=_runner(_list), add_arguments=_add_list_arguments),
        Command("show", "Show one with its attempts.", run=_runner(_show), add_arguments=_add_show_arguments),
        Command("replay", "Deliver again.", run=_runner(_replay), add_arguments=_add_choice_arguments),
        Command("purge", "Throw away.", run=_runner(_purge), add_arguments=_add_choice_arguments),
        webhook_secret.COMMAND,
    ),
)
