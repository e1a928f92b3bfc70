"""What each Redis of a deployment says of itself, as metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from redis.exceptions import NoPermissionError, RedisError

from ...producer.control.deployment_samples import PATIENCE_S
from ...shared.connection import CommandConnection
from ...shared.errors import PenstockError
from ...shared.metrics import Sample, values_of
from ...shared.redis_access.check import info_fields


async def redis_samples(servers: Mapping[str, CommandConnection]) -> list[Sample]:
    """Ask all servers at once; one that does not answer in time is down."""
    found = await asyncio.gather(*(_of_server(name, server) for name, server in servers.items()))
    return [sample for samples in found for sample in samples]


async def _of_server(name: str, server: CommandConnection) -> list[Sample]:
    try:
        async with asyncio.timeout(PATIENCE_S):
            info = info_fields(await server.execute("INFO"))
    except NoPermissionError:
        return [*values_of((name,), {"redis_up": 1.0})]  # it answers, though not that
    except (TimeoutError, PenstockError, RedisError):
        return [*values_of((name,), {"redis_up": 0.0})]
    figures = {
        "redis_up": 1.0,
        "redis_used_memory_bytes": float(info["used_memory"]),
        "redis_max_memory_bytes": float(info["maxmemory"]),
        "redis_append_only": float(info["aof_enabled"]),
    }
    return [*values_of((name,), figures)]
