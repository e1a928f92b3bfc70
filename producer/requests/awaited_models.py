"""Models that requests wait for although no worker has served them yet.

The other models are known by the card that a worker has left. A client that enqueues for a name without a card writes
the name down before, so that commands, pages and metrics find its queue. A typo would wait unseen otherwise.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Iterable

from redis.exceptions import NoPermissionError, RedisError

from ...shared.connection import CommandConnection
from ...shared.errors import PenstockError
from ...shared.keys import Keys
from ...shared.partitions import open_queue
from ...shared.process.log import get_logger
from ...shared.values.names import did_you_mean

RECORD_EVERY_S = 60.0
# A name whose queue is empty is removed after this time. It exceeds what a client may wait before it records it again.
KEPT_S = 3600.0
# The newest names. More are of a program that makes them up.
MAX_MODELS = 100
PATIENCE_S = 2.0

log = get_logger(__name__)


class AwaitedModels:
    """The names without a card, in Redis as a hash: name to Unix time in seconds of the last recording."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._recorded_at: dict[str, float] = {}

    async def record(self, model: str, known: Iterable[str]) -> None:
        """Write down a name before a request is enqueued under it; at most once in ``RECORD_EVERY_S``, as is the log.

        Args:
            known: names that have cards, for the log.
        """
        now = time.monotonic()
        if now - self._recorded_at.get(model, -math.inf) < RECORD_EVERY_S:
            return
        self._recorded_at[model] = now
        log.warning("model_awaited", model=model, known=known_models(model, known))
        try:
            await self._connection.execute("HSET", self._keys.awaited_models(), model, f"{time.time():.3f}")
        except NoPermissionError as error:
            # Users of Redis that were made for an older version. The request is accepted without it.
            log.warning("model_not_recorded", model=model, reason=str(error))

    async def read(self, known: Collection[str]) -> list[str]:
        """Return the names for which requests wait or run, sorted; those that have got a card are removed.

        Args:
            known: names that have cards.
        """
        fields = await self._connection.execute("HGETALL", self._keys.awaited_models())
        recorded = {name.decode(): float(at) for name, at in zip(fields[::2], fields[1::2], strict=True)}
        if served := sorted(recorded.keys() & set(known)):
            await self._remove(served)
        newest = sorted(recorded.keys() - set(known), key=recorded.__getitem__, reverse=True)[:MAX_MODELS]
        are_used = await asyncio.gather(*map(self._is_used, newest))
        used = {name for name, is_used in zip(newest, are_used, strict=True) if is_used}
        oldest = time.time() - KEPT_S
        for name in newest:
            if name not in used and recorded[name] < oldest:
                await self._remove([name])
                if await self._is_used(name):
                    # A request came between the two looks.
                    await self._connection.execute("HSET", self._keys.awaited_models(), name, f"{time.time():.3f}")
        return sorted(used)

    async def _is_used(self, model: str) -> bool:
        """Whether a request waits or runs, as far as is known: the Redis that has the queue may be away."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                stats = await (await open_queue(self._connection, self._keys, model)).stats()
        except (TimeoutError, PenstockError, RedisError):
            return True
        return bool(stats.depth or stats.num_running or stats.num_awaiting_input)

    async def _remove(self, names: list[str]) -> None:
        try:
            await self._connection.execute("HDEL", self._keys.awaited_models(), *names)
        except RedisError as error:
            log.debug("model_not_recorded", model=names[0], reason=str(error))


def known_models(model: str, known: Iterable[str]) -> str:
    """Return which models are known, and the likely name if ``model`` may be a typo."""
    names = sorted(known)
    hint = did_you_mean(model, names)
    return f"known models: {', '.join(names) or 'none'}" + (f"; {hint}" if hint else "")
