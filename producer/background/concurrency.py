"""Concurrency within a process: threads for long work, coroutines run together, and work slots shared among tenants.

Work that may take seconds runs in separate threads. ``asyncio.to_thread`` has few threads for all purposes: six on two
cores. One tenant's long work would occupy them all, and short work of other tenants (reading a file, decoding a body)
would wait for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class LongWork(enum.StrEnum):
    """The kinds of long work. Each kind has its own threads, so that no kind waits for another."""

    ADAPTERS = "adapters"
    BATCHES = "batches"
    IO_PROCESSORS = "io_processors"


# More than two threads read and hash files no faster. Plugins have as many threads as an event loop has by default.
_NUM_THREADS = {
    LongWork.ADAPTERS: 2,
    LongWork.BATCHES: 2,
    LongWork.IO_PROCESSORS: min(32, (os.cpu_count() or 1) + 4),
}
# By event loop, since threads do not survive a fork. They end when their loop is garbage collected.
_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[LongWork, ThreadPoolExecutor]] = WeakKeyDictionary()


async def in_long_thread(kind: LongWork, function: Callable[..., T], *args: Any) -> T:
    """Return ``function(*args)``, computed in a thread of its kind. Raises the errors of ``function``."""
    loop = asyncio.get_running_loop()
    pools = _pools.setdefault(loop, {})
    if kind not in pools:
        pools[kind] = ThreadPoolExecutor(_NUM_THREADS[kind], f"penstock-{kind}")
    context = contextvars.copy_context()
    return await loop.run_in_executor(pools[kind], partial(context.run, function, *args))


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


class TenantSlots:
    """Counts the occupied slots of this process by tenant.

    While ``n`` tenants work, each has at most a share of one in ``n + 1`` of the slots, so another tenant finds a free
    slot.

    Args:
        num_slots: number of slots.
        max_per_tenant: upper limit for one tenant, however few others work.
    """

    def __init__(self, num_slots: int, max_per_tenant: int) -> None:
        self._num_slots = num_slots
        self._max_per_tenant = max_per_tenant
        self._working: Counter[str] = Counter()

    @contextmanager
    def occupy(self, tenant: str) -> Iterator[bool]:
        """Occupy a slot within the block. Yields False if ``tenant`` has no free slot."""
        num_tenants = len(self._working) + (tenant not in self._working)
        limit = max(1, min(self._max_per_tenant, self._num_slots // (num_tenants + 1)))
        if self._working[tenant] >= limit or self._working.total() >= self._num_slots:
            yield False
            return
        self._working[tenant] += 1
        try:
            yield True
        finally:
            self._working[tenant] -= 1
            if not self._working[tenant]:
                del self._working[tenant]
