"""Operators' calls about the sleep of an engine, by who decides when it wakes: the operator, or the supervisor.

A device that several models share may have no memory for the engine now. So its supervisor decides, a call to wake up
is a wish, and after a call to sleep only an operator wakes the engine.
"""

from __future__ import annotations

import asyncio

from ....shared.control.calls import CallError, Utility, UtilityAnswer
from ....shared.control.engine import Sleep, WakeUp
from ....shared.errors import from_wire
from ..reporting.heartbeat import Heartbeat


class OwnDevice:
    """A device that belongs to this engine: calls are executed when they arrive."""

    async def hold_back(self, call: Utility) -> None:
        """Wait until an operator's call may be executed."""

    def record_outcome(self, call: Utility, outcome: UtilityAnswer | CallError) -> None:
        """Record the outcome of an operator's call."""

    def settle_order(self, call: Sleep | WakeUp, outcome: UtilityAnswer | CallError) -> None:
        """Record the outcome of an order of the supervisor."""


class SharedDevice(OwnDevice):
    """A device that several models share. Status lines report wishes and holds to the supervisor."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._wishes: list[asyncio.Future[None]] = []

    async def hold_back(self, call: Utility) -> None:
        """Wait for the supervisor's order before a call to wake up.

        Raises:
            PenstockError: the order failed.
        """
        if isinstance(call, Sleep):
            # Before the engine sleeps, or the supervisor would wake it at once for waiting requests.
            self._hold(is_held=True)
        elif isinstance(call, WakeUp):
            self._hold(is_held=False)
            if self._heartbeat.sleep_level:
                self._wishes.append(asyncio.get_running_loop().create_future())
                self._heartbeat.num_wishes += 1
                self._heartbeat.report()
                await self._wishes[-1]

    def record_outcome(self, call: Utility, outcome: UtilityAnswer | CallError) -> None:
        if isinstance(call, Sleep) and isinstance(outcome, CallError):
            self._hold(is_held=False)

    def settle_order(self, call: Sleep | WakeUp, outcome: UtilityAnswer | CallError) -> None:
        if not isinstance(call, WakeUp):
            return
        for wish in self._wishes:
            if wish.done():
                continue  # its caller has left
            if isinstance(outcome, CallError):
                wish.set_exception(from_wire(outcome.code, outcome.message, retryable=False))
            else:
                wish.set_result(None)
        self._wishes.clear()

    def _hold(self, *, is_held: bool) -> None:
        if self._heartbeat.is_held != is_held:
            self._heartbeat.is_held = is_held
            self._heartbeat.report()
