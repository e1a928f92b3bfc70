"""Which adapters an engine has loaded, as claims go by it."""

from __future__ import annotations

from collections.abc import Iterable

from ..connection import CommandConnection
from ..keys import ModelKeys
from .repair import run_script

# Said again after a third of it, so that a Redis that has lost it, or a partition that is new, knows soon.
LOADED_TTL_MS = 30_000


async def say_loaded(
    connection: CommandConnection,
    keys: ModelKeys,
    engine_id: str,
    digests: Iterable[str],
    *,
    ttl_ms: int = LOADED_TTL_MS,
) -> None:
    """Let claims know that an engine has loaded these adapters, and no others, for ``ttl_ms`` from now.

    Raises ``RedisUnavailableError`` when Redis stays away for longer than the connection retries.
    """
    await run_script(connection, keys, "set_adapters", [keys.leases], [engine_id, ttl_ms, *digests])
