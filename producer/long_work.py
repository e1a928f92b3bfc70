"""Threads for work that may take seconds, separate from the event loop's default threads.

``asyncio.to_thread`` has few threads for all purposes: six on two cores. One tenant's long work would occupy them all,
and short work of other tenants (reading a file, decoding a body) would wait for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
