"""The processes of a deployment: engines by their heartbeats, all others by their records.

The others are gateways, jobs processes, supervisors, fleets, dashboards and exporters of metrics. Each writes a record
under a time to live.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any

import msgspec
from redis.exceptions import RedisError

from ..connection import CommandConnection
from ..errors import PenstockError
from ..keys import Keys
from ..messages import WIRE_VERSION
from ..messages.devices import DeviceRecord
from ..process.log import get_logger, last_error
from ..process.waiting import wait_at_most
from ..redis_access.link import in_parts
from ..values.distribution import VERSION
from .records import UNREADABLE, EngineHeartbeat, decode_record, decode_records

INTERVAL_S = 5.0
TTL_MS = 16_000
# Listing drops the ids of silent processes, and rarely one that reports at the same time.
ENTERED_AGAIN_EVERY = 6
log = get_logger(__name__)
# Longer than the time to live of any heartbeat or process record.
MAX_TTL_MS = 60_000


class ProcessKind(StrEnum):
    GATEWAY = "gateway"
    JOBS = "jobs"
    DASHBOARD = "dashboard"
    SUPERVISOR = "supervisor"
    FLEET = "fleet"
    EXPORTER = "metrics exporter"


class ProcessRecord(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Record of one process, which it writes every five seconds. JSON.

    Args:
        kind: one of ``ProcessKind``, or one of a newer version.
        package_version: version of its distribution.
        started_at, said_at, last_error_at: Unix times in seconds by its host's clock; the last 0 without an error.
        options: options that other processes need: where it listens, which worker it is.
        last_error: its last logged error, as event and reason, without prompts or outputs.
    """

    version: int = WIRE_VERSION
    process_id: str
    kind: str
    host: str
    pid: int
    package_version: str
    started_at: float
    said_at: float = 0.0
    options: dict[str, str] = {}
    last_error: str = ""
    last_error_at: float = 0.0


class Presence:
    """Reports this process until ``leave``.

    Args:
        options: as in ``ProcessRecord``; without secrets, since every user of this Redis can read them.
    """

    def __init__(
        self, connection: CommandConnection, keys: Keys, kind: ProcessKind, options: dict[str, str] | None = None
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._task: asyncio.Task[None] | None = None
        self._is_due = asyncio.Event()
        self._num_said = 0
        self.record = ProcessRecord(
            process_id=f"{kind.replace(' ', '-')}-{uuid.uuid4().hex[:12]}",
            kind=kind,
            host=socket.gethostname(),
            pid=os.getpid(),
            package_version=VERSION,
            started_at=time.time(),
            options=options or {},
        )

    async def run(self) -> None:
        """Report until cancelled. An unavailable Redis gets the record when it is back."""
        while True:
            self._is_due.clear()
            try:
                await self.say()
            except (PenstockError, RedisError) as error:
                log.debug("presence_not_written", error=str(error))
            await wait_at_most(INTERVAL_S, self._is_due.wait())

    def say_now(self) -> None:
        """Report a changed record without waiting for its time."""
        self._is_due.set()

    async def say(self) -> None:
        """Report once."""
        record = self.record
        record.said_at = time.time()
        record.last_error, record.last_error_at = last_error()
        data = msgspec.json.encode(record)
        former = await self._connection.execute("SET", self._keys.process(record.process_id), data, "PX", TTL_MS, "GET")
        if former is None or self._num_said % ENTERED_AGAIN_EVERY == 0:
            await self._connection.execute("SADD", self._keys.processes(), record.process_id)
        self._num_said += 1

    def start(self) -> None:
        """Run in a task, which ``leave`` ends."""
        self._task = asyncio.create_task(self.run())

    async def leave(self) -> None:
        """Remove this process from the list. In an unavailable Redis the record expires. Idempotent."""
        if self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            async with asyncio.timeout(1.0):
                await self._connection.execute("DEL", self._keys.process(self.record.process_id))
                await self._connection.execute("SREM", self._keys.processes(), self.record.process_id)
        except (TimeoutError, PenstockError, RedisError) as error:
            log.debug("presence_not_removed", error=str(error))


def _unreadable(process_id: str) -> ProcessRecord:
    """Return the list entry of a process whose record cannot be read."""
    return ProcessRecord(
        process_id=process_id, kind=UNREADABLE, host="-", pid=0, package_version="-", started_at=time.time()
    )


async def read_processes(execute: Callable[..., Awaitable[Any]], keys: Keys) -> list[ProcessRecord]:
    """Return the live processes, by kind and start, and drop the ids of the others.

    Args:
        execute: runs one command: ``CommandConnection.execute``.
    """
    records: list[ProcessRecord] = []
    for process_id, data in await read_listed(execute, keys.processes(), keys.process):
        record = decode_record("process record", process_id, data, ProcessRecord)
        records.append(record or _unreadable(process_id))
    return sorted(records, key=lambda process: (process.kind, process.started_at))


async def read_heartbeats(
    execute: Callable[..., Awaitable[Any]], keys: Keys, *, unreadable: list[str] | None = None
) -> list[EngineHeartbeat]:
    """Return the heartbeats that have not expired, by engine id, and drop the ids of the others.

    Args:
        execute: runs one command: ``CommandConnection.execute``.
        unreadable: collects the ids of engines whose heartbeats cannot be read.
    """
    beats: list[EngineHeartbeat] = []
    for engine_id, data in await read_listed(execute, keys.engines(), keys.engine):
        beat = decode_record("heartbeat", engine_id, data, EngineHeartbeat)
        if beat is not None:
            beats.append(beat)
        elif unreadable is not None:
            unreadable.append(engine_id)
    return beats


async def read_devices(execute: Callable[..., Awaitable[Any]], keys: Keys) -> list[DeviceRecord]:
    """Return the live devices that several models share, by id, and drop the ids of the others.

    Args:
        execute: runs one command: ``CommandConnection.execute``.
    """
    listed = await read_listed(execute, keys.devices(), keys.device)
    return list(decode_records("device record", listed, DeviceRecord))


async def read_listed(
    execute: Callable[..., Awaitable[Any]], ids_key: str, key_of: Callable[[str], str]
) -> list[tuple[str, bytes]]:
    """Return the ids in a set with the values of their keys, and drop ids whose keys have expired."""
    ids = sorted(member.decode() for member in await execute("SMEMBERS", ids_key))
    if not ids:
        return []
    values: list[bytes | None] = []
    for part in in_parts([key_of(one) for one in ids]):
        values += await execute("MGET", *part)
    expired = [one for one, data in zip(ids, values, strict=True) if data is None]
    if expired:
        # A slow process that is dropped here enters itself again with its next record.
        await execute("SREM", ids_key, *expired)
    return [(one, data) for one, data in zip(ids, values, strict=True) if data is not None]


async def drop_overdue(execute: Callable[..., Awaitable[Any]], keys: Keys) -> None:
    """Drop records of engines, processes and devices from before the clock of Redis went back; they would expire late.

    Live ones are written again within seconds.
    """
    for ids_key, key_of in (
        (keys.engines(), keys.engine),
        (keys.processes(), keys.process),
        (keys.devices(), keys.device),
    ):
        for member in await execute("SMEMBERS", ids_key):
            key = key_of(member.decode())
            if await execute("PTTL", key) > MAX_TTL_MS:
                await execute("UNLINK", key)
