"""Health of models: whether live engines serve them by their heartbeats, and the last errors that a client saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import RedisError

from ...shared.broker import Homes
from ...shared.connection import CommandConnection
from ...shared.deployment.presence import read_heartbeats
from ...shared.deployment.records import EngineHeartbeat
from ...shared.errors import EngineDeadError, PenstockError
from ...shared.keys import Keys
from ...shared.messages.supervision import EngineState
from ...shared.values.shown import shown

# Engines that hold a loaded model and make progress. All of them accept or finish requests, now or soon. A starting
# engine may never become ready, and a stalled one may never continue.
LIVE_STATES = frozenset(
    {EngineState.READY, EngineState.BUSY, EngineState.DRAINING, EngineState.COMPILING, EngineState.SLEEPING}
)

# An engine in one of these states receives no commands.
DEAF_STATES = frozenset({EngineState.STARTING, EngineState.DEAD, EngineState.STOPPED, EngineState.FAILED})


def may_serve(engine: EngineHeartbeat) -> bool:
    """Return whether an engine serves its model or will: also one that starts, stalls, or waits for its restart."""
    if engine.state is EngineState.DEAD:
        return engine.restart_at > 0
    return engine.state not in (EngineState.STOPPED, EngineState.FAILED)


class Health:
    """Reads heartbeats on request, and remembers for each model the last error that no engine serves it."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._dead: dict[str, EngineDeadError] = {}
        self._used: dict[str, None] = {}

    @property
    def used(self) -> list[str]:
        """Models that this client has used."""
        return [*self._used]

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Newest error of a model that was not seen alive since."""
        return next(reversed(self._dead.values()), None)

    async def check(self, model: str) -> None:
        """Read the heartbeats now. A model without an engine is healthy if a device may wake it.

        Raises:
            EngineDeadError: ``model`` has no live engine; gives the state of each engine.
        """
        self._used[model] = None
        engines = await self.engines(model)
        if not any(engine.state in LIVE_STATES for engine in engines) and not await self._has_home(model):
            self.saw_dead(model, _dead_error(model, engines))
            raise self._dead[model]
        self.saw_alive(model)

    async def _has_home(self, model: str) -> bool:
        """Return whether a device may wake a model. Devices enter all partitions, so the first is enough."""
        homes = (await Homes(self._connection, self._keys.model(model)).demand()).homes
        return any(not home.error for home in homes)

    async def unserved(self, model: str) -> EngineDeadError:
        """Return the error for a request that was refused because no engine of ``model`` holds a lease."""
        return _dead_error(model, await self.engines(model))

    @contextmanager
    def watching(self, model: str) -> Iterator[None]:
        """Remember an ``EngineDeadError`` that comes out of the block."""
        self._used[model] = None
        try:
            yield
        except EngineDeadError as error:
            self.saw_dead(model, error)
            raise

    def saw_dead(self, model: str, error: EngineDeadError) -> None:
        self._dead.pop(model, None)  # the newest goes to the end
        self._dead[model] = error

    def saw_alive(self, model: str) -> None:
        self._dead.pop(model, None)

    async def engines(self, model: str) -> list[EngineHeartbeat]:
        """Return the heartbeats of the model's engines that have not expired."""
        heartbeats = await read_heartbeats(self._connection.execute, self._keys)
        return [heartbeat for heartbeat in heartbeats if heartbeat.model == model]


def _dead_error(model: str, engines: list[EngineHeartbeat]) -> EngineDeadError:
    causes = [_cause(engine) for engine in engines if engine.state not in LIVE_STATES]
    if not causes:
        # An engine without a lease accepts no requests, even if its heartbeat is live.
        causes = ["none of its engines holds a lease" if engines else "it has no engine with a heartbeat or a lease"]
    waits = [engine.restart_at - time.time() for engine in engines if engine.restart_at > 0]
    message = f"no live engine serves model {shown(model)}: {'; '.join(causes)}"
    return EngineDeadError(message, retry_after_s=max(0.0, min(waits)) if waits else None)


def _cause(engine: EngineHeartbeat) -> str:
    return f"engine {engine.engine_id} is {engine.state}" + (f" ({engine.error})" if engine.error else "")


INTERVAL_S = 1.0
# Polling ends if the health was not read for this long.
LINGER_S = 10.0


class HealthWatch:
    """Polls the heartbeats of the models that the client uses, as long as ``look`` is called from time to time."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None
        self._looked_at_s = 0.0

    def open(self) -> None:
        """Allow polling in the running event loop; it begins with the first ``look``."""
        self._loop = asyncio.get_running_loop()

    def look(self) -> None:
        """Start polling or keep it running. May be called in any thread; does nothing before ``open``."""
        self._looked_at_s = time.monotonic()
        if self._loop is not None and self._watching is None:
            self._loop.call_soon_threadsafe(self._begin_watching)

    async def close(self) -> None:
        """Stop polling. The remembered errors stay."""
        self._loop = None
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def _begin_watching(self) -> None:
        if self._loop is not None and self._watching is None:
            self._watching = asyncio.create_task(self._watch_heartbeats())

    async def _watch_heartbeats(self) -> None:
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
