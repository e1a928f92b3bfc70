"""The engines of a deployment, as their heartbeats tell."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from .command_parts import in_parts
from .keys import Keys
from .records import EngineHeartbeat


async def read_heartbeats(execute: Callable[..., Awaitable[Any]], keys: Keys) -> list[EngineHeartbeat]:
    """Return the heartbeats that have not expired, by engine id, and drop the ids of the others.

    Args:
        execute: runs one command: ``CommandConnection.execute``, or ``execute_command`` of redis-py's client.
    """
    engine_ids = sorted(member.decode() for member in await execute("SMEMBERS", keys.engines()))
    if not engine_ids:
        return []
    beats: list[bytes | None] = []
    for part in in_parts([keys.engine(engine_id) for engine_id in engine_ids]):
        beats += await execute("MGET", *part)
    gone = [engine_id for engine_id, beat in zip(engine_ids, beats, strict=True) if beat is None]
    if gone:
        # A slow engine that is dropped here enters itself again with its next beat.
        await execute("SREM", keys.engines(), *gone)
    return [msgspec.json.decode(beat, type=EngineHeartbeat) for beat in beats if beat is not None]
