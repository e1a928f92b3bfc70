"""What was read to its end is kept for a shorter time: most of what a busy Redis holds is answers nobody asks for.

Requests whose id somebody chose are left alone unless their caller says otherwise: the id may be sent again, and must
find the answer then. Several are told of together, a moment later, and if that fails they live as long as others do.
"""

from __future__ import annotations

import asyncio

from ...shared.broker import Broker
from ...shared.errors import PenstockError
from ...shared.process.log import get_logger

TOLD_AFTER_S = 0.5
# Nobody waits for it, so a client that leaves does not wait for long either.
CLOSE_TIMEOUT_S = 1.0

log = get_logger(__name__)


class ReadResults:
    """Gathers what has been read, and tells Redis."""

    def __init__(self) -> None:
        self._read: dict[tuple[Broker, int], list[str]] = {}
        self._telling: asyncio.Task[None] | None = None

    def note(self, broker: Broker, request_id: str, ttl_s: float) -> None:
        """Keep the result of a request that was read to its end for ``ttl_s`` from now on."""
        self._read.setdefault((broker, int(ttl_s * 1000)), []).append(request_id)
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell_soon())

    async def close(self) -> None:
        """Tell what was not told yet."""
        if self._telling is not None:
            self._telling.cancel()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._tell()
        except TimeoutError:
            log.debug("read_results_not_told", error="no time")

    async def _tell_soon(self) -> None:
        while self._read:
            await asyncio.sleep(TOLD_AFTER_S)
            await self._tell()

    async def _tell(self) -> None:
        read, self._read = self._read, {}
        for (broker, ttl_ms), request_ids in read.items():
            try:
                await broker.shorten(request_ids, ttl_ms)
            except PenstockError as error:
                log.debug("read_results_not_told", error=str(error))
