"""Metrics of each Redis of a deployment, from INFO."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from redis.exceptions import NoPermissionError, RedisError

from ...producer.control.deployment import SCRAPE_PATIENCE_S
from ...shared.connection import CommandConnection
from ...shared.errors import PenstockError
from ...shared.metrics import Sample, values_of
from ...shared.redis_access.check import info_fields


async def redis_samples(servers: Mapping[str, CommandConnection]) -> list[Sample]:
    """Read all servers concurrently. A server that does not answer in time counts as down."""
    by_server = await asyncio.gather(*(_server_samples(name, server) for name, server in servers.items()))
    return [sample for samples in by_server for sample in samples]


async def _server_samples(name: str, server: CommandConnection) -> list[Sample]:
    try:
        async with asyncio.timeout(SCRAPE_PATIENCE_S):
            info = info_fields(await server.execute("INFO"))
    except NoPermissionError:
        return [*values_of((name,), {"redis_up": 1.0})]  # it answers, but forbids INFO
    except (TimeoutError, PenstockError, RedisError):
        return [*values_of((name,), {"redis_up": 0.0})]
    values = {
        "redis_up": 1.0,
        "redis_used_memory_bytes": float(info["used_memory"]),
        "redis_max_memory_bytes": float(info["maxmemory"]),
        "redis_append_only": float(info["aof_enabled"]),
    }
    return [*values_of((name,), values)]
