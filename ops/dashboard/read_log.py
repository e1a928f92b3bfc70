"""A request's log, read on from where it was read last. A look at a log keeps no abandoned request alive."""

from __future__ import annotations

import asyncio

from ...shared.broker import Broker
from ...shared.messages import Delta

MAX_SHOWN_CHARS = 20_000


class ReadLog:
    """What a log has said so far."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.num_records = 0
        self.whole: Delta | None = None
        # The watcher and a page may ask at once.
        self._lock = asyncio.Lock()

    async def read_on(self, request_id: str) -> Delta | None:
        """Return all deltas so far as one; None before the first.

        Raises:
            DamagedRecordError: others than the scripts have written to the log.
        """
        async with self._lock:
            records = await self._broker.read_log(request_id, self.num_records)
            for record in records:
                if self.whole is None or record.index < self.whole.next_index:
                    self.whole = record  # the first, or that of a replay which has begun anew
                else:
                    self.whole.extend(record)
            self.num_records += len(records)
            return self.whole
