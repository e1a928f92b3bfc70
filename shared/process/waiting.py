"""Wait with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


async def wait_at_most(timeout_s: float | None, work: Awaitable[object]) -> bool:
    """Await ``work``, and cancel it after ``timeout_s``; return whether it has finished."""
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except TimeoutError:
        return False
    return True
