"""Readers that leave a request some time to live without them, so that who was cut off can come back once more.

The first reader's leaving gives the request a lease of its own (``InteractiveRequest.leave``); here whoever follows it
renews that lease meanwhile. So a reader that leaves and a process that dies come to the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from ...shared.broker import Broker
from ...shared.errors import RedisUnavailableError
from ...shared.process.log import get_logger

# Renewed when a third of it is over: what is left then is linger_s.
LEASE_PER_LINGER = 1.5

log = get_logger(__name__)


@contextmanager
def lingering(broker: Broker, request_id: str, linger_s: float) -> Iterator[None]:
    """See to it that the request, unless it is detached, lives for ``linger_s`` after the block; 0 does nothing."""
    if not linger_s:
        yield
        return
    renewing = asyncio.create_task(_renew(broker, request_id, linger_s))
    try:
        yield
    finally:
        renewing.cancel()


async def _renew(broker: Broker, request_id: str, linger_s: float) -> None:
    lease_ms = max(1, int(linger_s * LEASE_PER_LINGER * 1000))
    while True:
        try:
            await broker.leave(request_id, lease_ms)
        except RedisUnavailableError as error:
            log.warning("request_lease_not_renewed", request_id=request_id, error=str(error))
        await asyncio.sleep(linger_s / 2)
