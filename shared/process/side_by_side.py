"""Repeats the same work for each of many names, so that one that hangs does not delay the others.

Models may be on several Redis servers: a command to one that is away is waited for, and meanwhile the models of the
others must be renewed, reaped and looked after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class SideBySide(Generic[K]):
    """Does ``work`` for each name in a task of its own, at most once at a time."""

    def __init__(self, work: Callable[[K], Awaitable[None]]) -> None:
        self._work = work
        self._under_way: dict[K, asyncio.Task[None]] = {}

    async def round(self, names: Iterable[K], patience_s: float) -> list[BaseException]:
        """Start work for all names without running work, and wait until all are done, or ``patience_s`` have passed.

        Returns the errors of work that has ended since the last round.
        """
        for name in {*names} - self._under_way.keys():
            self._under_way[name] = asyncio.create_task(self._run_one(name))
        if self._under_way:
            await asyncio.wait(self._under_way.values(), timeout=patience_s)
        ended = [self._under_way.pop(name) for name, task in [*self._under_way.items()] if task.done()]
        return [error for task in ended if not task.cancelled() and (error := task.exception()) is not None]

    async def close(self) -> None:
        """Cancel running work."""
        tasks = [*self._under_way.values()]
        self._under_way.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_one(self, name: K) -> None:
        await self._work(name)
