"""A thread for long texts, so that they do not hold the event loop of a worker process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# What is longer takes milliseconds.
LONG_TEXT_CHARS = 4096

T = TypeVar("T")


class TextThread:
    """One thread, which takes work in its order.

    Prompts and control calls have a thread each: long texts of the one do not delay the other, and neither waits for
    the threads of the event loop, which resolve host names. More threads would take the processor from the engine.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Return what ``work`` returns.

        Args:
            size: of the text in characters, or in its number of tokens. If it is small, ``work`` is called at once,
                since that costs less than the way to a thread and back.
        """
        if size <= LONG_TEXT_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
