"""The end of a request that is due while nobody else looks: no worker runs at all, or none that serves anything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

from ...shared.errors import PenstockError
from .lease import InteractiveRequest

# The clocks of client and Redis differ, and engines end what they run by themselves.
GRACE_S = 1.0


@contextmanager
def ended_when_due(request: InteractiveRequest, due_in_s: float | None) -> Iterator[None]:
    """From its deadline on, have the broker end what is due, for as long as the block is not left."""
    if due_in_s is None:
        yield
        return
    sweeping = asyncio.create_task(_sweep(request, due_in_s))
    try:
        yield
    finally:
        sweeping.cancel()


async def _sweep(request: InteractiveRequest, due_in_s: float) -> None:
    await asyncio.sleep(max(0.0, due_in_s) + GRACE_S)
    while True:
        # Redis is away: whoever waits for the request waits for it, too.
        with contextlib.suppress(PenstockError):
            await request.broker.expire()
        await asyncio.sleep(GRACE_S)
