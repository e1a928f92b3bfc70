"""The engines of a deployment, by their heartbeats."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ..keys import Keys
from ..redis_access.command_parts import in_parts
from .records import EngineHeartbeat
from .unreadable import decode_record

# Longer than the time to live of any heartbeat or process record.
MAX_TTL_MS = 60_000


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
    """Drop records of engines and processes from before the clock of Redis went back; they would expire late.

    Live ones are written again within seconds.
    """
    for ids_key, key_of in ((keys.engines(), keys.engine), (keys.processes(), keys.process)):
        for member in await execute("SMEMBERS", ids_key):
            key = key_of(member.decode())
            if await execute("PTTL", key) > MAX_TTL_MS:
                await execute("UNLINK", key)
