"""Several works at once, of which all are wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all, and return their results in order; if one fails the others are cancelled, and its error is raised."""
    each = [*works]
    if len(each) == 1:
        return [await each[0]]  # without a task of its own
    tasks = [asyncio.create_task(work) for work in each]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
