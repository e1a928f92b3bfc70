"""Incremental reader of a request's log. Reading does not keep an abandoned request alive."""

from __future__ import annotations

import asyncio

from ...shared.broker import Broker
from ...shared.messages.deltas import Delta

MAX_SHOWN_CHARS = 20_000


class ReadLog:
    """The log of one request, as far as it has been read.

    Each read starts at the last known record. If that record is different or missing, the request was replayed under
    the same id, or Redis lost the end of the log. Then the log is read from its start.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._num_records = 0
        self._last: Delta | None = None
        self._whole: Delta | None = None
        # The watcher and a page may read at the same time.
        self._lock = asyncio.Lock()

    async def read_new(self, request_id: str) -> Delta | None:
        """Return all deltas so far, merged into one; None before the first.

        Raises:
            DamagedRecordError: a foreign writer has written to the log.
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
