"""The engines of a deployment, as their heartbeats tell."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ..keys import Keys
from ..redis_access.command_parts import in_parts
from .records import EngineHeartbeat
from .unreadable import decode_record

# Longer than any heartbeat or process record lives.
MAX_TTL_MS = 60_000


async def read_heartbeats(
    execute: Callable[..., Awaitable[Any]], keys: Keys, *, unreadable: list[str] | None = None
) -> list[EngineHeartbeat]:
    """Return the heartbeats that have not expired, by engine id, and drop the ids of the others.

    Args:
        execute: runs one command: ``CommandConnection.execute``.
        unreadable: gets the ids of engines whose heartbeats cannot be read.
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
    """Return the ids in a set with what stands under their keys, and drop the ids whose keys have expired."""
    ids = sorted(member.decode() for member in await execute("SMEMBERS", ids_key))
    if not ids:
        return []
    said: list[bytes | None] = []
    for part in in_parts([key_of(one) for one in ids]):
        said += await execute("MGET", *part)
    gone = [one for one, data in zip(ids, said, strict=True) if data is None]
    if gone:
        # One that is slow and dropped here enters itself again, the next time that it says that it is there.
        await execute("SREM", ids_key, *gone)
    return [(one, data) for one, data in zip(ids, said, strict=True) if data is not None]


async def drop_overdue(execute: Callable[..., Awaitable[Any]], keys: Keys) -> None:
    """Drop what engines and processes said before the clock of Redis went back: it would outlive them by as much.

    Whoever lives says it again within seconds.
    """
    for ids_key, key_of in ((keys.engines(), keys.engine), (keys.processes(), keys.process)):
        for member in await execute("SMEMBERS", ids_key):
            key = key_of(member.decode())
            if await execute("PTTL", key) > MAX_TTL_MS:
                await execute("UNLINK", key)
