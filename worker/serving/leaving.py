"""Wait for Redis while the engine serves, and only briefly once it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

# How long a stopping engine waits for each reply of Redis. Nothing is lost without the reply, because leases and
# registrations expire, and other workers reclaim the requests.
LEAVE_PATIENCE_S = 3.0


async def until_leaving(
    work: Coroutine[Any, Any, Any] | asyncio.Task[Any], leaving: asyncio.Event, patience_s: float = LEAVE_PATIENCE_S
) -> bool:
    """Wait for ``work`` without a limit; once ``leaving`` is set, wait ``patience_s`` more and then cancel it.

    Returns whether it ended without being cancelled. Raises the exception of ``work``, if any.
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
