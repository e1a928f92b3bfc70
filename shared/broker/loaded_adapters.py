"""Reports which adapters an engine has loaded, so that claims can use it."""

from __future__ import annotations

from collections.abc import Iterable

from ..connection import CommandConnection
from ..keys import ModelKeys
from .repair import run_script

# Reported again after a third of this time, so that a Redis that lost it, or a new partition, gets it soon.
LOADED_TTL_MS = 30_000


async def report_loaded(
    connection: CommandConnection,
    keys: ModelKeys,
    engine_id: str,
    digests: Iterable[str],
    *,
    ttl_ms: int = LOADED_TTL_MS,
) -> None:
    """Report that an engine has loaded these adapters, and no others, for ``ttl_ms`` from now on.

    Raises ``RedisUnavailableError`` when Redis is unavailable for longer than the connection retries.
    """
    await run_script(connection, keys, "set_adapters", [keys.leases], [engine_id, ttl_ms, *digests])
