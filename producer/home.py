"""Where a client is at home: the process and the event loop that opened it. It is of no use to any other.

After a fork the child has the sockets, and nobody who reads them: what it waits for would never come, and what it wrote
would end up between its parent's commands. The same holds for a second event loop, were it not told.
"""

from __future__ import annotations

import asyncio
import os

from ..shared.errors import ClientClosedError


class Home:
    """Knows whether a client is open, and for whom."""

    def __init__(self) -> None:
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_open(self) -> bool:
        """Whether it is open in this process."""
        return self._loop is not None and not self.is_forked

    @property
    def is_forked(self) -> bool:
        """Whether it was opened by a process that this one was forked from."""
        return self._loop is not None and self._pid != os.getpid()

    def settle(self) -> None:
        """Be at home in this process and the running event loop."""
        self._pid, self._loop = os.getpid(), asyncio.get_running_loop()

    def leave(self) -> None:
        """Be open to nobody."""
        self._loop = None

    def check(self) -> None:
        """Return if the caller may use the client. A caller without an event loop may ask for what it iterates in one.

        Raises:
            ClientClosedError: the client is not connected, or it is at home elsewhere.
        """
        if self._loop is None:
            raise ClientClosedError("the client is not connected; use it inside `async with Client.connect(url)`")
        if self.is_forked:
            raise ClientClosedError(
                f"the client was connected by process {self._pid}, which forked this one; connect after the fork "
                "(gunicorn: without --preload, or in post_fork), or use LLM, which connects anew by itself"
            )
        if _running_loop() not in (None, self._loop):
            raise ClientClosedError(
                "the client was connected in another event loop; use it in that one (under WSGI each async view has a "
                "loop of its own: use LLM there), or connect in this one"
            )


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
