"""Wait for Redis while the engine serves, and not for long once it is to leave."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

# An engine that is to leave waits so long for each thing that it still wants from Redis. Nothing is lost without it:
# leases and lists end by themselves, and other workers take back what was claimed.
LEAVE_PATIENCE_S = 3.0


async def until_leaving(
    work: Coroutine[Any, Any, Any] | asyncio.Task[Any], leaving: asyncio.Event, patience_s: float = LEAVE_PATIENCE_S
) -> bool:
    """Wait for ``work`` as long as it takes, but only ``patience_s`` more once ``leaving`` is set; then cancel it.

    Returns whether it came to its end, and raises what it raised.
    """
    task = asyncio.ensure_future(work)
    signal = asyncio.create_task(leaving.wait())
    try:
        await asyncio.wait([task, signal], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([task], timeout=patience_s)
    finally:
        signal.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
    if task.cancelled():
        return False
    task.result()
    return True
