"""An engine that sleeps without a core. Its worker process answers calls and renews the lease, and loads no model.

An engine whose process dies while it sleeps starts again like this, because its device may have no memory for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ....shared.control.calls import UtilityAnswer
from ....shared.control.engine import KV_CACHE, WEIGHTS, IsSleeping, Sleep, SleepState, WakeUp
from ..reporting.heartbeat import Heartbeat


class UnloadedSleep:
    """Handler of the calls about sleep until the core serves.

    Attributes:
        woken: set by the first ``WakeUp``. The worker process then starts the core, and calls ``confirm_awake`` or
            ``report_failure``.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.woken = asyncio.Event()

    @property
    def functions(self) -> dict[type, Callable[[Any], Awaitable[UtilityAnswer]]]:
        """Functions that answer calls, by type of call."""
        return {Sleep: self._deepen, WakeUp: self._load_and_wake, IsSleeping: self._current_state}

    def confirm_awake(self) -> None:
        """Answer the ``WakeUp``, because the engine serves."""
        self._outcome.set_result(None)

    def report_failure(self, error: Exception) -> None:
        """Answer the ``WakeUp`` with the reason why the core has not started. The next process sleeps again."""
        self._outcome.set_exception(error)
        self._outcome.exception()  # a caller may be absent, since a call can be cancelled

    async def _deepen(self, call: Sleep) -> SleepState:
        self._heartbeat.set_sleep_level(max(call.level, self._heartbeat.sleep_level))
        return await self._current_state()

    async def _load_and_wake(self, _: WakeUp) -> SleepState:
        """Have all parts loaded, whichever the call names: a core starts awake."""
        self.woken.set()
        await asyncio.shield(self._outcome)
        return SleepState()

    async def _current_state(self, _: IsSleeping | None = None) -> SleepState:
        return SleepState(self._heartbeat.sleep_level, [WEIGHTS, KV_CACHE], is_unloaded=True)
