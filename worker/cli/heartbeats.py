"""The engines of a deployment, as their heartbeats tell."""

from __future__ import annotations

import redis.asyncio

from ...shared.deployment import heartbeats
from ...shared.deployment.records import EngineHeartbeat
from ...shared.keys import Keys


async def read_heartbeats(client: redis.asyncio.Redis, keys: Keys) -> list[EngineHeartbeat]:
    """Return the heartbeats of all engines, by engine id, and drop the ids of those that have none.

    An engine that is dead while its supervisor lives has one too, written by the supervisor, with the cause.
    """
    return await heartbeats.read_heartbeats(client.execute_command, keys)
