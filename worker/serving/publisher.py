"""Writes deltas to the broker: everything that waits goes out in one call for each way in which records are written.

While a call is under way, further deltas of a request are merged, so that the load on Redis falls as the rate
rises. Per request the order holds, because a call ends before the next begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...shared.broker import Broker, FinalRecord, Record, SegmentRecord
from ...shared.messages import Delta
from .engine_meter import EngineMeter


class Publisher:
    """``on_stale(request_id, epoch)`` is called for each claim that a write proved stale; ``meter`` counts deltas."""

    def __init__(self, broker: Broker, on_stale: Callable[[str, int], None], meter: EngineMeter) -> None:
        self._broker = broker
        self._on_stale = on_stale
        self._meter = meter
        self._waiting: dict[str, Record] = {}
        self._wake = asyncio.Event()
        self._is_idle = True
        self._flushes: list[asyncio.Future[None]] = []

    def publish(self, request_id: str, epoch: int, delta: Delta) -> None:
        """Append ``delta``, and end the request, or its segment, if the delta ends it. Returns at once."""
        self._meter.note_delta(delta)
        before = self._waiting.get(request_id)
        if before is not None and before.epoch == epoch:
            delta = before.delta.followed_by(delta)
        self._waiting[request_id] = _kind(delta)(request_id, epoch, delta)
        self._is_idle = False
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                flushes, self._flushes = self._flushes, []
                await self._write()
                _resolve(flushes)
            self._is_idle = True
            flushes, self._flushes = self._flushes, []
            _resolve(flushes)

    async def flush(self) -> None:
        """Return when everything published before this call is in Redis, whatever is published meanwhile."""
        if self._is_idle:
            return
        flushed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # For the write that begins next; the one under way, if any, ends before that.
        self._flushes.append(flushed)
        await flushed

    async def _write(self) -> None:
        records, self._waiting = list(self._waiting.values()), {}
        finals = [record for record in records if isinstance(record, FinalRecord)]
        ends = [record for record in records if isinstance(record, SegmentRecord)]
        running = [record for record in records if not isinstance(record, FinalRecord | SegmentRecord)]
        calls = []
        if running:
            calls.append(self._broker.append(running))
        if ends:
            calls.append(self._broker.end_segments(ends))
        if finals:
            calls.append(self._broker.finish(finals))
        epochs = {record.request_id: record.epoch for record in records}
        for refused in await asyncio.gather(*calls):
            for request_id in refused:
                self._on_stale(request_id, epochs[request_id])


def _kind(delta: Delta) -> type[Record]:
    if delta.finished:
        return FinalRecord
    return SegmentRecord if delta.segment_ends else Record


def _resolve(flushes: list[asyncio.Future[None]]) -> None:
    for flushed in flushes:
        if not flushed.done():
            flushed.set_result(None)
