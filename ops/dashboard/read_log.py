"""A request's log, read on from where it was read last. A look at a log keeps no abandoned request alive."""

from __future__ import annotations

import asyncio

from ...shared.broker import Broker
from ...shared.connection import CommandConnection
from ...shared.messages import Delta

MAX_SHOWN_CHARS = 20_000


class ReadLog:
    """What a log has said so far.

    A log may begin anew under the same id, by a replay, or lose its last records with a Redis. So each look also reads
    the first record, which tells of the former, and holds the index of the next against what was read.
    """

    def __init__(self, connection: CommandConnection, broker: Broker) -> None:
        self._connection = connection
        self._broker = broker
        self._first: list[bytes] = []
        self._num_records = 0
        self._whole: Delta | None = None
        # The watcher and a page may ask at once.
        self._lock = asyncio.Lock()

    async def read_on(self, request_id: str) -> Delta | None:
        """Return all deltas so far as one; None before the first.

        Raises:
            DamagedRecordError: others than the scripts have written to the log.
        """
        async with self._lock:
            first = await self._connection.execute("LRANGE", self._broker.keys.log(request_id), 0, 0)
            if first != self._first:
                self._forget()
                self._first = first
            records = await self._broker.read_log(request_id, self._num_records)
            if records and self._whole is not None and records[0].index != self._whole.next_index:
                self._forget()
                records = await self._broker.read_log(request_id)
            for record in records:
                if self._whole is None:
                    self._whole = record
                else:
                    self._whole.extend(record)
            self._num_records += len(records)
            return self._whole

    def _forget(self) -> None:
        self._num_records, self._whole = 0, None
