"""Write deltas to the broker in batches: one call per type of record for everything that is due.

First tokens and ends are due immediately. Tokens in between are batched: under load they wait briefly, so readers get
fewer and larger deltas. The cost of a delta at the worker, Redis and the client does not depend on its size. The wait
is ``PAUSE_PER_DELTA_S`` for each delta of the last write, at most the stream interval. So a few streams always get
their tokens one by one, and the cost of many streams is bounded. When Redis is overloaded, the wait is longer
(``redis_waiting.py``).

Deltas of a request that arrive while a call is in flight are merged. The order per request holds because calls never
overlap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...shared.broker import Broker, FinalRecord, Record, SegmentRecord
from ...shared.messages.deltas import Delta
from .reporting.engine_meter import EngineMeter
from .requests.generation import Generation

# A delta costs about 50 microseconds over all processes, so deltas that may wait use an eighth of a core.
PAUSE_PER_DELTA_S = 0.0004


class Publisher:
    """Writer of one partition's deltas.

    Args:
        on_stale: called with request_id and epoch of each claim that a write showed to be stale.
        meter: counts deltas.
        stream_interval_s: longest wait of a token while Redis is not overloaded. With 0, calls follow each other
            without a pause.
        pressure_s: shortest wait, in seconds; above 0 while Redis is overloaded.
    """

    def __init__(
        self,
        broker: Broker,
        on_stale: Callable[[str, int], None],
        meter: EngineMeter,
        stream_interval_s: float = 0.0,
        pressure_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._broker = broker
        self._on_stale = on_stale
        self._meter = meter
        self._stream_interval_s = stream_interval_s
        self._pressure_s = pressure_s
        self._pending: dict[str, Record] = {}
        self._scheduled: dict[str, Generation] = {}
        self._is_batch_due = False
        self._next_batch_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._is_idle = True
        self._flushes: list[asyncio.Future[None]] = []

    @property
    def is_idle(self) -> bool:
        """Whether everything that was published is in Redis."""
        return self._is_idle

    def publish(self, request_id: str, epoch: int, delta: Delta) -> None:
        """Write ``delta`` without delay, and end its request or segment if it is the last. Does not block."""
        self._meter.count_delta(delta)
        self._add(request_id, epoch, delta)
        self._is_idle = False
        self._wake.set()

    def schedule(self, generation: Generation) -> None:
        """Schedule a write of the pending tokens of ``generation``, including those it adds until then."""
        self._scheduled[generation.request_id] = generation
        if self._timer is None and not self._is_batch_due:
            loop = asyncio.get_running_loop()
            self._is_idle = False
            if self._next_batch_at_s > loop.time():
                self._timer = loop.call_at(self._next_batch_at_s, self._start_batch)
            else:
                self._start_batch()

    def forget(self, request_id: str) -> None:
        """Discard the scheduled write of a request whose claim is lost."""
        self._scheduled.pop(request_id, None)

    async def run(self) -> None:
        """Write due deltas until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending or self._is_batch_due:
                flushes, self._flushes = self._flushes, []
                await self._write_batch()
                _resolve(flushes)
            self._is_idle = self._timer is None
            flushes, self._flushes = self._flushes, []
            _resolve(flushes)

    async def flush(self) -> None:
        """Wait until everything published before this call is in Redis. Later deltas do not prolong the wait."""
        if self._is_idle:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._start_batch()
        flushed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Resolved by the next write, which begins after one in flight has ended.
        self._flushes.append(flushed)
        await flushed

    def _start_batch(self) -> None:
        self._timer = None
        self._is_batch_due = True
        self._wake.set()

    def _add(self, request_id: str, epoch: int, delta: Delta) -> None:
        pending = self._pending.get(request_id)
        if pending is not None and pending.epoch == epoch:
            pending.delta.extend(delta)
            delta = pending.delta
        self._pending[request_id] = _record_type(delta)(request_id, epoch, delta)

    def _collect_batch(self) -> None:
        """Turn scheduled tokens into deltas, and set the earliest time of the next batch."""
        scheduled, self._scheduled = self._scheduled, {}
        self._is_batch_due = False
        for generation in scheduled.values():
            delta = generation.pop_delta()
            if delta is not None:
                self._add(generation.request_id, generation.epoch, delta)
        pause_s = min(self._stream_interval_s, len(scheduled) * PAUSE_PER_DELTA_S)
        if self._stream_interval_s:
            pause_s = max(pause_s, self._pressure_s())
        self._next_batch_at_s = asyncio.get_running_loop().time() + pause_s

    async def _write_batch(self) -> None:
        if self._is_batch_due:
            self._collect_batch()
        records, self._pending = list(self._pending.values()), {}
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
        # A single call needs no task, which saves one iteration of the event loop.
        replies = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
        for stale_ids in filter(None, replies):
            epochs = {record.request_id: record.epoch for record in records}
            for request_id in stale_ids:
                self._on_stale(request_id, epochs[request_id])


def _record_type(delta: Delta) -> type[Record]:
    if delta.finished:
        return FinalRecord
    return SegmentRecord if delta.segment_ends else Record


def _resolve(flushes: list[asyncio.Future[None]]) -> None:
    for flushed in flushes:
        if not flushed.done():
            flushed.set_result(None)
