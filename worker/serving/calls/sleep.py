"""Puts the engine to sleep and wakes it: what becomes of requests is decided here, what becomes of memory in the core.
Also empties its cache, for which it may have to be cleared of requests as well.

While it sleeps it claims nothing, and its lease and heart go on: its model counts as served, and requests wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from ....shared.control.caches import ResetPrefixCache
from ....shared.control.calls import Utility, UtilityAnswer
from ....shared.control.sleeping import IsSleeping, Sleep, SleepState, WakeUp
from ....shared.errors import BrokerError, EngineTimeoutError
from ....shared.messages.outcome import FinishReason
from ....shared.messages.worker_status import EngineState
from ..claiming import ClaimLoop
from ..core.client import CoreClient
from ..partitions.served_partitions import ServedPartition, ServedPartitions
from ..requests.running_generations import RunningGenerations
from ..telling.heartbeat import Heartbeat
from ..telling.request_observer import Departure, RequestObserver

log = structlog.get_logger()


class SleepControl:
    """Its parts are shared with the ``WorkerService``. One call at a time."""

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

    async def sleep(self, call: Sleep) -> SleepState:
        """Claim nothing more, clear the engine of its requests, and let the core give back its memory.

        If that fails, an engine that is awake serves on.
        """
        try:
            await self.clear(call.mode, call.drain_timeout_s)
            state = await self._ask(call)
        except Exception:
            await self.go_on()
            raise
        await self._follow(state)
        return state

    async def wake_up(self, call: WakeUp) -> SleepState:
        """Let the core take its memory again; when all is back, serve."""
        state = await self._ask(call)
        await self._follow(state)
        return state

    async def reset_prefix_cache(self, call: ResetPrefixCache) -> UtilityAnswer:
        """Let the core forget its cache; if that is wanted, all that runs is queued again before, here or elsewhere."""
        if not call.reset_running_requests:
            return await self._core.call(call)
        try:
            await self.clear("keep", 0.0)
            return await self._core.call(call)
        finally:
            await self.go_on()

    async def clear(self, mode: str, timeout_s: float, *, may_hand_back: bool = True) -> None:
        """Claim nothing more until ``go_on``, and clear the engine of its requests, as ``Sleep.mode`` says.

        Raises:
            EngineTimeoutError: with "wait" some still run after ``timeout_s``, and are not to be queued again.
        """
        await self._claiming.pause()
        await self._modes[mode](timeout_s)
        if mode == "wait" and not may_hand_back and len(self._live):
            raise EngineTimeoutError(f"{len(self._live)} requests still run after {timeout_s:g} s (drain_timeout_s)")
        await self._hand_back()

    async def go_on(self) -> None:
        """Serve again after ``clear``, if the core is awake."""
        await self._follow(await self._ask(IsSleeping()))

    async def _follow(self, state: SleepState) -> None:
        """Serve if the core is awake, and say what it does."""
        if state.is_sleeping:
            self._heartbeat.state = EngineState.SLEEPING
        else:
            self._heartbeat.state = EngineState.READY
            self._claiming.resume()
        await self._heartbeat.beat()

    async def _keep(self, _: float) -> None:
        """All is handed back, as it is."""

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
            self._observer.note_end(generation, delta)
            self._forget(generation.request_id)

    async def _hand_back(self) -> None:
        """Give what is still here to others, with all that it has generated in Redis."""
        for generation in self._live.all():
            self._observer.note_departure(generation, Departure.HANDED_BACK)
            self._forget(generation.request_id)
        num_returned = sum(await asyncio.gather(*map(self._release, self._parts)))
        if num_returned:
            log.info("requests_handed_back", num_requests=num_returned)

    async def _release(self, part: ServedPartition) -> int:
        await part.publisher.flush()
        # What Redis says, not what we know: the reply of a claim may have been lost.
        claims = await part.broker.claims(self._engine_id)
        return await part.broker.release(claims) if claims else 0

    def _forget(self, request_id: str) -> None:
        core_id = self._live.remove(request_id)
        if core_id is not None:
            self._core.abort_requests([core_id])

    async def _ask(self, call: Utility) -> SleepState:
        answer = await self._core.call(call)
        if not isinstance(answer, SleepState):
            raise BrokerError(f"the engine core answered {type(call).__name__} with {type(answer).__name__}")
        return answer
