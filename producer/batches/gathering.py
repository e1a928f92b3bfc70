"""Waiting for several at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order; the first error is raised as it is, when the others have been cancelled."""
    tasks = [asyncio.create_task(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
