"""Writes deltas to the broker: everything that is due goes out in one call for each way in which records are written.

First tokens and ends are due at once. What is generated in between waits for a moment under load, and gathers: readers
get fewer and larger deltas, whose price at the worker, Redis and the client does not depend on their size. How long it
waits follows from how much was written last, ``PAUSE_PER_DELTA_S`` for each delta, up to the stream interval: a few
streams get their tokens one by one, at any rate, and what many streams cost is bounded. When Redis is short of time, it
waits longer (``redis_pressure.py``).

While a call is under way, too, deltas of a request are merged. Per request the order holds, because a call ends before
the next begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...shared.broker import Broker, FinalRecord, Record, SegmentRecord
from ...shared.messages.deltas import Delta
from .requests.generation import Generation
from .telling.engine_meter import EngineMeter

# A delta costs all processes about 50 microseconds together. So deltas that may wait take an eighth of a core.
PAUSE_PER_DELTA_S = 0.0004


class Publisher:
    """``on_stale(request_id, epoch)`` is called for each claim that a write proved stale; ``meter`` counts deltas.

    ``stream_interval_s`` is the longest that a token waits to be written while Redis has time to spare; where it has
    not, tokens wait ``pressure_s()`` at least. An interval of 0 writes as fast as calls can follow each other.
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
        self._waiting: dict[str, Record] = {}
        self._gathering: dict[str, Generation] = {}
        self._gathered_due = False
        self._next_due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._is_idle = True
        self._flushes: list[asyncio.Future[None]] = []

    @property
    def is_idle(self) -> bool:
        """Whether everything that was published is in Redis."""
        return self._is_idle

    def publish(self, request_id: str, epoch: int, delta: Delta) -> None:
        """Append ``delta`` at once, and end the request, or its segment, if the delta ends it. Returns at once."""
        self._meter.note_delta(delta)
        self._add(request_id, epoch, delta)
        self._is_idle = False
        self._wake.set()

    def gather(self, generation: Generation) -> None:
        """Append what ``generation`` has gathered, in a moment: what it gathers until then goes with it."""
        self._gathering[generation.request_id] = generation
        if self._timer is None and not self._gathered_due:
            loop = asyncio.get_running_loop()
            self._is_idle = False
            if self._next_due_s > loop.time():
                self._timer = loop.call_at(self._next_due_s, self._end_wait)
            else:
                self._end_wait()

    def forget(self, request_id: str) -> None:
        """Do not write what a request has gathered: its claim is not ours any more."""
        self._gathering.pop(request_id, None)

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting or self._gathered_due:
                flushes, self._flushes = self._flushes, []
                await self._write()
                _resolve(flushes)
            self._is_idle = self._timer is None
            flushes, self._flushes = self._flushes, []
            _resolve(flushes)

    async def flush(self) -> None:
        """Return when everything published before this call is in Redis, whatever is published meanwhile."""
        if self._is_idle:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._end_wait()
        flushed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # For the write that begins next; the one under way, if any, ends before that.
        self._flushes.append(flushed)
        await flushed

    def _end_wait(self) -> None:
        self._timer = None
        self._gathered_due = True
        self._wake.set()

    def _add(self, request_id: str, epoch: int, delta: Delta) -> None:
        before = self._waiting.get(request_id)
        if before is not None and before.epoch == epoch:
            before.delta.extend(delta)
            delta = before.delta
        self._waiting[request_id] = _kind(delta)(request_id, epoch, delta)

    def _take_gathered(self) -> None:
        """Make deltas of what was gathered, and settle when the next of them are due."""
        gathering, self._gathering = self._gathering, {}
        self._gathered_due = False
        for generation in gathering.values():
            delta = generation.take()
            if delta is not None:
                self._add(generation.request_id, generation.epoch, delta)
        pause_s = min(self._stream_interval_s, len(gathering) * PAUSE_PER_DELTA_S)
        if self._stream_interval_s:
            pause_s = max(pause_s, self._pressure_s())
        self._next_due_s = asyncio.get_running_loop().time() + pause_s

    async def _write(self) -> None:
        if self._gathered_due:
            self._take_gathered()
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
        # Alone it needs no task of its own, and so leaves a turn of the loop sooner.
        answers = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
        for refused in filter(None, answers):
            epochs = {record.request_id: record.epoch for record in records}
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
