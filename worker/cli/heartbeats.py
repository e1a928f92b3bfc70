"""The engines of a deployment, as their heartbeats tell."""

from __future__ import annotations

from collections import defaultdict

import redis.asyncio

from ...shared.deployment import heartbeats
from ...shared.deployment.records import EngineHeartbeat
from ...shared.keys import Keys


async def read_heartbeats(client: redis.asyncio.Redis, keys: Keys) -> list[EngineHeartbeat]:
    """Return the heartbeats of all engines, by engine id, and drop the ids of those that have none.

    An engine that is dead while its supervisor lives has one too, written by the supervisor, with the cause.
    """
    return await heartbeats.read_heartbeats(client.execute_command, keys)


def by_worker(beats: list[EngineHeartbeat]) -> dict[str, list[EngineHeartbeat]]:
    """Group heartbeats by the worker (the ``worker start``) that their engines belong to."""
    workers: dict[str, list[EngineHeartbeat]] = defaultdict(list)
    for beat in beats:
        workers[beat.worker_id].append(beat)
    return dict(workers)
