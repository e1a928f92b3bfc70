"""Run several coroutines concurrently when all results are needed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines and return their results in order. If one fails, cancel the others and raise its error."""
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
