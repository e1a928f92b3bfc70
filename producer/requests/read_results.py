"""Shorter lifetimes of results that were read to the end, because a busy Redis mostly holds answers that no one reads.

A request whose caller chose its id keeps its lifetime unless the caller says otherwise, because the same id may be sent
again and must find the answer. Lifetimes are written in batches after a short delay. If that fails, the results keep
their full lifetime.
"""

from __future__ import annotations

import asyncio

from ...shared.broker import Broker
from ...shared.errors import PenstockError
from ...shared.process.log import get_logger

WRITE_AFTER_S = 0.5
# Nothing depends on it, so a closing client waits only briefly.
CLOSE_TIMEOUT_S = 1.0

log = get_logger(__name__)


class ReadResults:
    """Collects the ids of read results, and shortens their lifetimes in Redis."""

    def __init__(self) -> None:
        self._read: dict[tuple[Broker, int], list[str]] = {}
        self._writing: asyncio.Task[None] | None = None

    def add(self, broker: Broker, request_id: str, ttl_s: float) -> None:
        """Shorten the lifetime of a result that was read to its end to ``ttl_s``, in seconds."""
        self._read.setdefault((broker, int(ttl_s * 1000)), []).append(request_id)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_soon())

    async def close(self) -> None:
        """Write the pending lifetimes."""
        if self._writing is not None:
            self._writing.cancel()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._write_lifetimes()
        except TimeoutError:
            log.debug("read_results_not_shortened", error="no time")

    async def _write_soon(self) -> None:
        while self._read:
            await asyncio.sleep(WRITE_AFTER_S)
            await self._write_lifetimes()

    async def _write_lifetimes(self) -> None:
        read, self._read = self._read, {}
        for (broker, ttl_ms), request_ids in read.items():
            try:
                await broker.shorten(request_ids, ttl_ms)
            except PenstockError as error:
                log.debug("read_results_not_shortened", error=str(error))
