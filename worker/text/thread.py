"""A thread for long texts, so that they do not block the event loop of a worker process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# Longer texts take milliseconds.
LONG_TEXT_CHARS = 4096

T = TypeVar("T")


class TextThread:
    """A single thread that executes work in order.

    Prompts and control calls have separate threads, so that long texts of one do not delay the other, and neither waits
    for the default threads of the event loop, which resolve host names. More threads would take CPU time from the
    engine.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Return the result of ``work``.

        Args:
            size: number of characters or tokens of the text. If it is small, ``work`` runs in the calling thread, which
                costs less than the switch to another thread.
        """
        if size <= LONG_TEXT_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
