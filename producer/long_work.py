"""Threads for work that may take seconds, apart from the event loop's own threads.

``asyncio.to_thread`` has few threads for everything: six on two cores. One tenant's long work would fill them, and what
takes a millisecond for everybody else (a read of a file, a body that is decoded) would wait behind it.
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
    """The kinds of long work. Each has threads of its own, so that one kind does not wait for another."""

    ADAPTERS = "adapters"
    BATCHES = "batches"
    IO_PROCESSORS = "io_processors"


# Reading and hashing files is as fast by two as by more. Code of others has as many as a loop has of its own.
_NUM_THREADS = {
    LongWork.ADAPTERS: 2,
    LongWork.BATCHES: 2,
    LongWork.IO_PROCESSORS: min(32, (os.cpu_count() or 1) + 4),
}
# Of each event loop, since threads do not survive a fork. Those of a loop that is gone end.
_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[LongWork, ThreadPoolExecutor]] = WeakKeyDictionary()


async def in_long_thread(kind: LongWork, function: Callable[..., T], *args: Any) -> T:
    """Return ``function(*args)``, computed in a thread of its kind; raises what that raises."""
    loop = asyncio.get_running_loop()
    pools = _pools.setdefault(loop, {})
    if kind not in pools:
        pools[kind] = ThreadPoolExecutor(_NUM_THREADS[kind], f"penstock-{kind}")
    context = contextvars.copy_context()
    return await loop.run_in_executor(pools[kind], partial(context.run, function, *args))
