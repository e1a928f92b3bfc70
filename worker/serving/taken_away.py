"""Requests that Redis has taken from this engine: it has ended them, or given them to another.

A cancellation is told; all else is noticed when Redis refuses a write, or in answer to the renewal of the lease.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog

from ...shared.errors import DamagedRecordError
from ...shared.messages.outcome import FinishReason
from ...shared.queue.request_state import RequestState
from .claiming import ClaimLoop
from .core.client import CoreClient
from .leaving import LEAVE_PATIENCE_S
from .partitions.served_partitions import ServedPartition, ServedPartitions
from .requests.generation import Generation
from .requests.running_generations import RunningGenerations
from .telling.request_observer import Departure, RequestObserver

_ENDED_FROM_OUTSIDE: dict[str | None, FinishReason] = {
    RequestState.CANCELLED: FinishReason.CANCELLED,
    RequestState.EXPIRED: FinishReason.EXPIRED,
}

log = structlog.get_logger()


class TakenAway:
    """Drops them, and says why. Its parts are the ``WorkerService``'s."""

    def __init__(
        self,
        parts: ServedPartitions,
        live: RunningGenerations,
        core: CoreClient,
        claiming: ClaimLoop,
        observer: RequestObserver,
    ) -> None:
        self._parts = parts
        self._live = live
        self._core = core
        self._claiming = claiming
        self._observer = observer
        self._telling: set[asyncio.Task[None]] = set()

    def note_cancelled(self, request_id: str) -> None:
        """Its cancellation was told; nothing to do for one that is not here."""
        generation = self._live.get(request_id)
        if generation is not None:
            part = self._parts[generation.partition]
            self._tell_later(part, generation.request_id, generation.epoch, generation, is_refused=False)
            self._drop(generation)

    def note_stale(self, partition: int, request_id: str, epoch: int) -> None:
        """Redis has refused us: the request was cancelled, or moved while we were taken for dead."""
        part = self._parts[partition]
        part.may_hold_unseen = True
        generation = self._live.get(request_id)
        if generation is not None and generation.epoch != epoch:
            generation = None
        self._tell_later(part, request_id, epoch, generation, is_refused=True)
        self._drop(generation)

    async def close(self) -> None:
        """Wait for what is still to be told, but not for a Redis that is away."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_PATIENCE_S):
                await asyncio.gather(*self._telling, return_exceptions=True)

    def _tell_later(
        self, part: ServedPartition, request_id: str, epoch: int, generation: Generation | None, *, is_refused: bool
    ) -> None:
        telling = asyncio.create_task(self._tell_why(part, request_id, epoch, generation, is_refused=is_refused))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _tell_why(
        self, part: ServedPartition, request_id: str, epoch: int, generation: Generation | None, *, is_refused: bool
    ) -> None:
        """Log why work on a request was dropped: that it was cancelled is ordinary, that a claim has moved is not."""
        ids = {"request_id": request_id} if generation is None else generation.ids
        try:
            state = await part.broker.state(request_id)
        except DamagedRecordError as error:
            state = error.code
        end = _ENDED_FROM_OUTSIDE.get(state)
        if generation is not None and not generation.finished:
            self._note_dropped(generation, end)
        if end is not None or not is_refused:
            log.debug("request_dropped", **ids, epoch=epoch, state=state)
        else:
            log.warning("claim_stale", **ids, epoch=epoch, state=state)

    def _note_dropped(self, generation: Generation, end: FinishReason | None) -> None:
        """Redis has ended it, or, with no ``end``, given it to others."""
        if end is None:
            self._observer.note_departure(generation, Departure.CLAIM_STALE)
        else:
            self._observer.note_end(generation, generation.cut_off(end))

    def _drop(self, generation: Generation | None) -> None:
        if generation is None:
            return
        self._parts[generation.partition].publisher.forget(generation.request_id)
        core_id = self._live.remove(generation.request_id)
        if core_id is not None:
            self._core.abort_requests([core_id])
        self._claiming.wake()
