"""A request's log, read on from where it was read last. A look at a log keeps no abandoned request alive."""

from __future__ import annotations

import asyncio

from ...shared.broker import Broker
from ...shared.messages.deltas import Delta

MAX_SHOWN_CHARS = 20_000


class ReadLog:
    """What a log has said so far.

    Each look begins with the record that was read last. If another one stands in its place, or none, the log has begun
    anew under the same id, by a replay, or lost its end with a Redis: then it is read from its start.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._num_records = 0
        self._last: Delta | None = None
        self._whole: Delta | None = None
        # The watcher and a page may ask at once.
        self._lock = asyncio.Lock()

    async def read_on(self, request_id: str) -> Delta | None:
        """Return all deltas so far as one; None before the first.

        Raises:
            DamagedRecordError: others than the scripts have written to the log.
        """
        async with self._lock:
            records = await self._broker.read_log(request_id, max(0, self._num_records - 1))
            if self._last is not None and records[:1] == [self._last]:
                records = records[1:]
            elif self._num_records:
                self._num_records, self._last, self._whole = 0, None, None
                records = await self._broker.read_log(request_id)
            for record in records:
                if self._whole is None:
                    self._whole = record
                else:
                    self._whole.extend(record)
                self._last = record
            self._num_records += len(records)
            return self._whole
