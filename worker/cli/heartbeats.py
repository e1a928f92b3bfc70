"""The engines of a deployment, as their heartbeats tell."""

from __future__ import annotations

from collections import defaultdict

import msgspec
import redis.asyncio

from ...shared.keys import Keys
from ...shared.messages import EngineHeartbeat


async def read_heartbeats(client: redis.asyncio.Redis, keys: Keys) -> list[EngineHeartbeat]:
    """Return the heartbeats of all live engines, by engine id, and drop the ids of the dead."""
    engine_ids = sorted(member.decode() for member in await client.smembers(keys.engines()))  # type: ignore[misc]  # redis-py: maybe not awaitable
    if not engine_ids:
        return []
    beats = await client.mget([keys.engine(engine_id) for engine_id in engine_ids])
    dead = [engine_id for engine_id, beat in zip(engine_ids, beats, strict=True) if beat is None]
    if dead:
        # A slow engine that is dropped here enters itself again with its next beat.
        await client.srem(keys.engines(), *dead)  # type: ignore[misc]  # redis-py: maybe not awaitable
    return [msgspec.json.decode(beat, type=EngineHeartbeat) for beat in beats if beat is not None]


def by_worker(heartbeats: list[EngineHeartbeat]) -> dict[str, list[EngineHeartbeat]]:
    """Group heartbeats by the worker (the ``worker start``) that their engines belong to."""
    workers: dict[str, list[EngineHeartbeat]] = defaultdict(list)
    for heartbeat in heartbeats:
        workers[heartbeat.worker_id].append(heartbeat)
    return dict(workers)
