"""Keeps what a client remembers of its engines true while somebody looks at it."""

from __future__ import annotations

import asyncio
import time

from redis.exceptions import RedisError

from ...shared.errors import EngineDeadError, PenstockError
from .health import Health

INTERVAL_S = 1.0
# Who has not looked for so long does not watch any more.
LINGER_S = 10.0


class HealthWatch:
    """Looks at the heartbeats of the models that the client uses, as long as ``look`` is called now and then."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None
        self._looked_at_s = 0.0

    def open(self) -> None:
        """Watch in the running event loop, once somebody looks."""
        self._loop = asyncio.get_running_loop()

    def look(self) -> None:
        """Somebody wants to know. To be called in any thread; does nothing before ``open``."""
        self._looked_at_s = time.monotonic()
        if self._loop is not None and self._watching is None:
            self._loop.call_soon_threadsafe(self._begin)

    async def close(self) -> None:
        """End; what is remembered stays as it is."""
        self._loop = None
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def _begin(self) -> None:
        if self._loop is not None and self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            if time.monotonic() - self._looked_at_s > LINGER_S:
                break
            for model in self._health.used:
                try:
                    await self._health.check(model)
                except EngineDeadError:
                    continue  # it is remembered
                except (PenstockError, RedisError):
                    break  # an absent Redis says nothing of engines
        self._watching = None
