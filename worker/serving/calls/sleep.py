"""Put the engine to sleep, wake it, and reset its prefix cache: this module handles requests, the core handles memory.

A sleeping engine claims nothing, but keeps its lease and sends heartbeats. So its model counts as served, and requests
are queued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from ....shared.control.calls import Utility, UtilityAnswer
from ....shared.control.engine import IsSleeping, ResetPrefixCache, Sleep, SleepState, WakeUp
from ....shared.errors import BrokerError, EngineTimeoutError
from ....shared.messages.outcome import FinishReason
from ....shared.messages.supervision import EngineState
from ..claiming import ClaimLoop
from ..core.client import CoreClient
from ..partitions.served_partitions import ServedPartition, ServedPartitions
from ..reporting.heartbeat import Heartbeat
from ..reporting.observers import Departure, RequestObserver
from ..requests.running_generations import RunningGenerations

# In events of requests that return to the queue.
_CAUSE = "its engine went to sleep"

log = structlog.get_logger()


class SleepControl:
    """Handler of sleep and cache calls, one at a time. Its collaborators are shared with the ``WorkerService``."""

    def __init__(
        self,
        engine_id: str,
        core: CoreClient,
        live: RunningGenerations,
        parts: ServedPartitions,
        claiming: ClaimLoop,
        heartbeat: Heartbeat,
        observer: RequestObserver,
    ) -> None:
        self._engine_id = engine_id
        self._core = core
        self._live = live
        self._parts = parts
        self._claiming = claiming
        self._heartbeat = heartbeat
        self._observer = observer
        self._modes: dict[str, Callable[[float], Awaitable[None]]] = {
            "keep": self._keep,
            "wait": self._wait,
            "abort": self._abort,
        }

    @property
    def functions(self) -> dict[type, Callable[[Any], Awaitable[UtilityAnswer]]]:
        """Functions that answer calls, by type of call."""
        return {
            Sleep: self.sleep,
            WakeUp: self.wake_up,
            IsSleeping: self._core.call,
            ResetPrefixCache: self.reset_prefix_cache,
        }

    async def sleep(self, call: Sleep) -> SleepState:
        """Pause claiming, clear the engine of requests, and have the core release its memory.

        After a failure, an engine that is awake continues to serve.
        """
        try:
            await self.clear(call.mode, call.drain_timeout_s, cause=call.cause or _CAUSE)
            # Before memory is released: if the engine dies now, others may use the memory before it starts again.
            self._heartbeat.set_sleep_level(max(call.level, self._heartbeat.sleep_level))
            state = await self._ask(call)
        except Exception:
            await self.resume()
            raise
        self._apply(state)
        return state

    async def wake_up(self, call: WakeUp) -> SleepState:
        """Have the core allocate its memory again; serve once all of it is back."""
        state = await self._ask(call)
        self._apply(state)
        return state

    async def reset_prefix_cache(self, call: ResetPrefixCache) -> UtilityAnswer:
        """Reset the core's prefix cache. If requested, return running requests to the queue before that."""
        if not call.reset_running_requests:
            return await self._core.call(call)
        try:
            await self.clear("keep", 0.0)
            return await self._core.call(call)
        finally:
            await self.resume()

    async def clear(self, mode: str, timeout_s: float, *, may_hand_back: bool = True, cause: str = "") -> None:
        """Pause claiming until ``resume``, and clear the engine of requests in the way of ``Sleep.mode``.

        Args:
            may_hand_back: whether requests that still run after ``timeout_s`` may return to the queue.
            cause: why, for the events of those that return.

        Raises:
            EngineTimeoutError: mode is "wait", requests still run after ``timeout_s``, and ``may_hand_back`` is False.
        """
        await self._claiming.pause()
        await self._modes[mode](timeout_s)
        if mode == "wait" and not may_hand_back and len(self._live):
            raise EngineTimeoutError(f"{len(self._live)} requests still run after {timeout_s:g} s (drain_timeout_s)")
        await self._hand_back(cause)

    async def resume(self) -> None:
        """Serve again after ``clear``, if the core is awake."""
        self._apply(await self._ask(IsSleeping()))

    def _apply(self, state: SleepState) -> None:
        """Apply the state of the core: report it, and claim again if the core is awake."""
        self._heartbeat.set_sleep_level(state.level)
        if state.is_sleeping:
            self._heartbeat.state = EngineState.SLEEPING
        else:
            self._heartbeat.state = EngineState.READY
            self._claiming.resume()

    async def _keep(self, _: float) -> None:
        """Do nothing: requests are released as they are."""

    async def _wait(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._live.until_none()
        except TimeoutError:
            log.info("requests_unfinished_at_sleep", num_requests=len(self._live))

    async def _abort(self, _: float) -> None:
        for generation in self._live.all():
            delta = generation.cut_off(FinishReason.ABORT)
            publisher = self._parts[generation.partition].publisher
            publisher.publish(generation.request_id, generation.epoch, delta)
            self._observer.record_end(generation, delta)
            self._forget(generation.request_id)

    async def _hand_back(self, cause: str) -> None:
        """Return all requests to the queue, after all that they have generated is in Redis."""
        for generation in self._live.all():
            self._observer.record_departure(generation, Departure.HANDED_BACK)
            self._forget(generation.request_id)
        num_returned = sum(await asyncio.gather(*(self._release(part, cause) for part in self._parts)))
        if num_returned:
            log.info("requests_handed_back", num_requests=num_returned)

    async def _release(self, part: ServedPartition, cause: str) -> int:
        await part.publisher.flush()
        # Ask Redis for the claims, because the reply of a claim may have been lost.
        claims = await part.broker.claims(self._engine_id)
        return await part.broker.release(claims, cause=cause) if claims else 0

    def _forget(self, request_id: str) -> None:
        core_id = self._live.remove(request_id)
        if core_id is not None:
            self._core.abort_requests([core_id])

    async def _ask(self, call: Utility) -> SleepState:
        answer = await self._core.call(call)
        if not isinstance(answer, SleepState):
            raise BrokerError(f"the engine core answered {type(call).__name__} with {type(answer).__name__}")
        return answer
