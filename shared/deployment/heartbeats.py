"""The engines of a deployment, as their heartbeats tell."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from ..keys import Keys
from ..redis_access.command_parts import in_parts
from .records import EngineHeartbeat

# Longer than any heartbeat or process record lives.
MAX_TTL_MS = 60_000


async def read_heartbeats(execute: Callable[..., Awaitable[Any]], keys: Keys) -> list[EngineHeartbeat]:
    """Return the heartbeats that have not expired, by engine id, and drop the ids of the others.

    Args:
        execute: runs one command: ``CommandConnection.execute``.
    """
    beats = await read_listed(execute, keys.engines(), keys.engine)
    return [msgspec.json.decode(beat, type=EngineHeartbeat) for beat in beats]


async def read_listed(
    execute: Callable[..., Awaitable[Any]], ids_key: str, key_of: Callable[[str], str]
) -> list[bytes]:
    """Return what stands under the keys of all ids in a set, by id, and drop the ids whose keys have expired."""
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
    return [data for data in said if data is not None]


async def drop_overdue(execute: Callable[..., Awaitable[Any]], keys: Keys) -> None:
    """Drop what engines and processes said before the clock of Redis went back: it would outlive them by as much.

    Whoever lives says it again within seconds.
    """
    for ids_key, key_of in ((keys.engines(), keys.engine), (keys.processes(), keys.process)):
        for member in await execute("SMEMBERS", ids_key):
            key = key_of(member.decode())
            if await execute("PTTL", key) > MAX_TTL_MS:
                await execute("UNLINK", key)
