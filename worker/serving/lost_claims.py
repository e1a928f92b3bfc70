"""Drop requests that this engine no longer owns: they were ended elsewhere, or claimed by another engine.

Cancellations arrive as messages. All other losses show when Redis refuses a write or the renewal of a lease.
"""

from __future__ import annotations

import asyncio

import structlog

from ...shared.errors import DamagedRecordError
from ...shared.messages.outcome import FinishReason
from ...shared.process.waiting import wait_at_most
from ...shared.queue.lifecycle import RequestState
from .claiming import ClaimLoop
from .core.client import CoreClient
from .partitions.served_partitions import ServedPartition, ServedPartitions
from .redis_waiting import LEAVE_PATIENCE_S
from .reporting.observers import Departure, RequestObserver
from .requests.generation import Generation
from .requests.running_generations import RunningGenerations

_ENDED_ELSEWHERE: dict[str | None, FinishReason] = {
    RequestState.CANCELLED: FinishReason.CANCELLED,
    RequestState.EXPIRED: FinishReason.EXPIRED,
}

log = structlog.get_logger()


class LostClaims:
    """Drops requests whose claim is lost, and logs the reason. Its collaborators belong to the ``WorkerService``."""

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
        self._reports: set[asyncio.Task[None]] = set()

    def drop_cancelled(self, request_id: str) -> None:
        """Drop a cancelled request. Unknown ids are ignored."""
        generation = self._live.get(request_id)
        if generation is not None:
            part = self._parts[generation.partition]
            self._schedule_report(part, generation.request_id, generation.epoch, generation, is_refused=False)
            self._drop(generation)

    def drop_stale(self, partition: int, request_id: str, epoch: int) -> None:
        """Drop a request whose write Redis refused: it was cancelled, or reclaimed while this engine seemed dead."""
        part = self._parts[partition]
        part.may_hold_unknown = True
        generation = self._live.get(request_id)
        if generation is not None and generation.epoch != epoch:
            generation = None
        self._schedule_report(part, request_id, epoch, generation, is_refused=True)
        self._drop(generation)

    async def close(self) -> None:
        """Wait until the reasons of all drops are logged, at most ``LEAVE_PATIENCE_S`` if Redis is unreachable."""
        await wait_at_most(LEAVE_PATIENCE_S, asyncio.gather(*self._reports, return_exceptions=True))

    def _schedule_report(
        self, part: ServedPartition, request_id: str, epoch: int, generation: Generation | None, *, is_refused: bool
    ) -> None:
        report = asyncio.create_task(self._report_reason(part, request_id, epoch, generation, is_refused=is_refused))
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    async def _report_reason(
        self, part: ServedPartition, request_id: str, epoch: int, generation: Generation | None, *, is_refused: bool
    ) -> None:
        """Log why a request was dropped: at debug level if it was ended, as a warning if its claim moved."""
        ids = {"request_id": request_id} if generation is None else generation.ids
        try:
            state = await part.broker.state(request_id)
        except DamagedRecordError as error:
            state = error.code
        end = _ENDED_ELSEWHERE.get(state)
        if generation is not None and not generation.finished:
            self._record_drop(generation, end)
        if end is not None or not is_refused:
            log.debug("request_dropped", **ids, epoch=epoch, state=state)
        else:
            log.warning("claim_stale", **ids, epoch=epoch, state=state)

    def _record_drop(self, generation: Generation, end: FinishReason | None) -> None:
        """Record how a request left: with ``end``, or without one if another engine claimed it."""
        if end is None:
            self._observer.record_departure(generation, Departure.CLAIM_STALE)
        else:
            self._observer.record_end(generation, generation.cut_off(end))

    def _drop(self, generation: Generation | None) -> None:
        if generation is None:
            return
        self._parts[generation.partition].publisher.forget(generation.request_id)
        core_id = self._live.remove(generation.request_id)
        if core_id is not None:
            self._core.abort_requests([core_id])
        self._claiming.wake()
