"""Writes deltas to the broker: everything that waits goes out in one append and one finish call.

While a call is under way, further deltas of a request are merged, so that the load on Redis falls as the rate
rises. Per request the order holds, because a call ends before the next begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...shared.broker import Broker, FinalRecord, Record
from ...shared.messages import Delta


class Publisher:
    """``on_refused(request_id)`` is called for each request whose claim proved stale."""

    def __init__(self, broker: Broker, on_refused: Callable[[str], None]) -> None:
        self._broker = broker
        self._on_refused = on_refused
        self._waiting: dict[str, Record] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def publish(self, request_id: str, epoch: int, delta: Delta) -> None:
        """Append ``delta``, and end the request if the delta ends it. Returns at once."""
        before = self._waiting.get(request_id)
        if before is not None:
            delta = before.delta.followed_by(delta)
        kind = FinalRecord if delta.finished else Record
        self._waiting[request_id] = kind(request_id, epoch, delta)
        self._idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled; raises RedisUnavailableError when Redis stays away."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._write()
            self._idle.set()

    async def flush(self) -> None:
        """Return when everything published so far is in Redis."""
        await self._idle.wait()

    async def _write(self) -> None:
        records, self._waiting = list(self._waiting.values()), {}
        finals = [record for record in records if isinstance(record, FinalRecord)]
        running = [record for record in records if not isinstance(record, FinalRecord)]
        calls = []
        if running:
            calls.append(self._broker.append(running))
        if finals:
            calls.append(self._broker.finish(finals))
        for refused in await asyncio.gather(*calls):
            for request_id in refused:
                self._on_refused(request_id)
