"""``worker drain`` and ``worker stop``: stop workers on this or other hosts, and wait until they have exited."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from functools import partial

from ...shared.connection import checked_connection
from ...shared.deployment.audit import Audit, acting_as, process_actor
from ...shared.deployment.orders import MARGIN_S, known_workers, make_leave, read_drains
from ...shared.deployment.records import EngineHeartbeat
from ...shared.errors import ConfigurationError
from ...shared.keys import Keys
from ...shared.messages.supervision import DrainCommand, StopCommand, WorkerCommand
from ...shared.process.command_line import Command, UsageError, add_redis_arguments
from ...shared.redis_access.embedded import resolve_redis_url


def _add_arguments(parser: argparse.ArgumentParser, *, drains: bool) -> None:
    parser.add_argument("worker_id", nargs="?", help="as shown by worker list; may be left out if there is only one")
    parser.add_argument("--all", action="store_true", help="every worker of this Redis and namespace")
    if drains:
        parser.add_argument(
            "--timeout",
            type=float,
            default=30.0,
            metavar="S",
            help="time for running requests before they are handed back; at most the worker's --drain-timeout (30)",
        )
    add_redis_arguments(parser)


def _drain(arguments: argparse.Namespace) -> int:
    return _make_leave(arguments, DrainCommand(timeout_s=arguments.timeout), arguments.timeout + MARGIN_S)


def _stop(arguments: argparse.Namespace) -> int:
    return _make_leave(arguments, StopCommand(), MARGIN_S)


def _make_leave(arguments: argparse.Namespace, command: WorkerCommand, patience_s: float) -> int:
    if arguments.all and arguments.worker_id:
        raise UsageError(f"give either {arguments.worker_id} or --all")
    with resolve_redis_url(arguments.redis_url) as url:
        left = asyncio.run(_command(url, arguments, command, patience_s))
    print(f"left: {', '.join(left)}" if left else "no workers")
    return 0


async def _command(url: str, arguments: argparse.Namespace, command: WorkerCommand, patience_s: float) -> list[str]:
    """Send ``command`` to the chosen workers, wait until they have exited, and return their ids."""
    keys = Keys(arguments.namespace)
    async with checked_connection(url, namespace=arguments.namespace) as connection:
        worker_ids = _choose(arguments, sorted(await known_workers(connection.execute, keys)))
        if not worker_ids:
            return []
        action = "worker.drain" if isinstance(command, DrainCommand) else "worker.stop"
        with acting_as(process_actor("cli")):
            async with Audit(connection, keys).audited(action, ", ".join(worker_ids)):
                await make_leave(connection.execute, keys, worker_ids, command, patience_s, DrainProgress().show)
    return worker_ids


class DrainProgress:
    """Lines on standard error for an operator who waits: one each time a worker's number of running requests changes.

    It lives as long as the command.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def show(self, beats: list[EngineHeartbeat]) -> None:
        """Print the changes since the last call."""
        for drain in read_drains(beats, time.time()):
            if self._numbers.get(drain.worker_id) != drain.num_running:
                self._numbers[drain.worker_id] = drain.num_running
                print(drain, file=sys.stderr)


def _choose(arguments: argparse.Namespace, worker_ids: list[str]) -> list[str]:
    if arguments.all:
        return worker_ids
    if not worker_ids:
        raise ConfigurationError(f"no worker is known to this Redis in namespace {arguments.namespace!r}")
    if arguments.worker_id in worker_ids:
        return [arguments.worker_id]
    if arguments.worker_id:
        raise ConfigurationError(f"unknown worker {arguments.worker_id!r}; known are {', '.join(worker_ids)}")
    if len(worker_ids) > 1:
        raise UsageError(f"name one of the workers or give --all; known are {', '.join(worker_ids)}")
    return worker_ids


DRAIN = Command(
    "drain",
    "Take no more requests, finish what runs, leave.",
    run=_drain,
    add_arguments=partial(_add_arguments, drains=True),
)
STOP = Command(
    "stop", "Hand back what runs and leave at once.", run=_stop, add_arguments=partial(_add_arguments, drains=False)
)
