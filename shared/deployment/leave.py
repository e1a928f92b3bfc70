"""Stops workers, here or on other hosts: publishes the command until a supervisor has received it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec

from ..errors import PenstockError
from ..keys import Keys
from ..messages.commands import WorkerCommand
from .heartbeats import read_heartbeats

# Time for the steps after the last request: releasing claims, unloading the model, the last heartbeat.
MARGIN_S = 15.0
POLL_INTERVAL_S = 0.1

Execute = Callable[..., Awaitable[Any]]


async def known_workers(execute: Execute, keys: Keys) -> set[str]:
    """Return the ids of the workers of which an engine sends heartbeats."""
    return {beat.worker_id for beat in await read_heartbeats(execute, keys)}


async def make_leave(
    execute: Execute, keys: Keys, worker_ids: Collection[str], command: WorkerCommand, patience_s: float
) -> None:
    """Send ``command`` to workers and return when they have left; absent ones count as left.

    Args:
        execute: runs one command: ``CommandConnection.execute``.

    Raises:
        PenstockError: some are still present after ``patience_s``; the message names them.
    """
    try:
        async with asyncio.timeout(patience_s):
            await asyncio.gather(*(send_to_worker(execute, keys, worker_id, command) for worker_id in worker_ids))
            while set(worker_ids) & await known_workers(execute, keys):  # noqa: ASYNC110  # no event crosses hosts
                await asyncio.sleep(POLL_INTERVAL_S)
    except TimeoutError:
        staying = await known_workers(execute, keys) & set(worker_ids)
        raise PenstockError(
            f"still there after {patience_s:g} s: {', '.join(sorted(staying)) or 'none'}; "
            "look at their logs, or send their supervisors SIGKILL"
        ) from None


async def send_to_worker(execute: Execute, keys: Keys, worker_id: str, command: WorkerCommand) -> None:
    """Publish until a supervisor has received it, since one that lost its connection listens again soon."""
    data = msgspec.msgpack.encode(command)
    while not await execute("PUBLISH", keys.worker_commands(worker_id), data):
        if worker_id not in await known_workers(execute, keys):
            return
        await asyncio.sleep(POLL_INTERVAL_S)
