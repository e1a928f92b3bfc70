"""Whether anybody serves a model, as its engines' heartbeats tell, and what this client last saw of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...shared.connection import CommandConnection
from ...shared.deployment.heartbeats import read_heartbeats
from ...shared.deployment.records import EngineHeartbeat
from ...shared.errors import EngineDeadError
from ...shared.keys import Keys
from ...shared.messages.worker_status import EngineState
from ...shared.values.shown import shown

# Who holds a loaded model and moves: all take requests or finish them, now or in a moment. An engine that is starting
# may never come up, and one that stalls may never go on.
LIVE_STATES = frozenset(
    {EngineState.READY, EngineState.BUSY, EngineState.DRAINING, EngineState.COMPILING, EngineState.SLEEPING}
)

# An engine in one of these states hears nothing yet, or nothing any more.
DEAF_STATES = frozenset({EngineState.STARTING, EngineState.DEAD, EngineState.STOPPED, EngineState.FAILED})


def may_serve(engine: EngineHeartbeat) -> bool:
    """Whether an engine serves its model or is going to: also one that starts, stalls, or waits for its next start."""
    if engine.state is EngineState.DEAD:
        return engine.restart_at > 0
    return engine.state not in (EngineState.STOPPED, EngineState.FAILED)


class Health:
    """Looks at heartbeats when asked, and remembers by model the last error that said nobody serves it."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._dead: dict[str, EngineDeadError] = {}
        self._used: dict[str, None] = {}

    @property
    def used(self) -> list[str]:
        """The models that this client has asked for, or asked about."""
        return [*self._used]

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The newest error of a model that was not seen alive since."""
        return next(reversed(self._dead.values()), None)

    async def check(self, model: str) -> None:
        """Look at the heartbeats now.

        Raises:
            EngineDeadError: none is of a live engine of ``model``; names what became of each.
        """
        self._used[model] = None
        engines = await self.engines(model)
        if not any(engine.state in LIVE_STATES for engine in engines):
            self.saw_dead(model, _dead_error(model, engines))
            raise self._dead[model]
        self.saw_alive(model)

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
        beats = await read_heartbeats(self._connection.execute, self._keys)
        return [beat for beat in beats if beat.model == model]


def _dead_error(model: str, engines: list[EngineHeartbeat]) -> EngineDeadError:
    causes = [_cause(engine) for engine in engines if engine.state not in LIVE_STATES]
    if not causes:
        # Without a lease even a live heartbeat is of an engine that takes nothing.
        causes = ["no engine of it holds a lease" if engines else "no engine of it beats or holds a lease"]
    return EngineDeadError(f"no live engine serves model {shown(model)}: {'; '.join(causes)}")


def _cause(engine: EngineHeartbeat) -> str:
    return f"engine {engine.engine_id} is {engine.state}" + (f" ({engine.error})" if engine.error else "")
