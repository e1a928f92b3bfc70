"""Which process and event loop may use a client: only those that opened it.

After a fork the child has the sockets but no task that reads them: it would wait for replies forever, and its writes
would mix with its parent's commands. A second event loop would have the same problem without the check here.
"""

from __future__ import annotations

import asyncio
import os

from ..shared.errors import ClientClosedError


class ClientLifecycle:
    """State of a client: open or closed, and in which process and event loop."""

    def __init__(self) -> None:
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_open(self) -> bool:
        """Whether the client is open in this process."""
        return self._loop is not None and not self.is_forked

    @property
    def is_forked(self) -> bool:
        """Whether the client was opened by a process from which this one was forked."""
        return self._loop is not None and self._pid != os.getpid()

    def open(self) -> None:
        """Mark the client as open in this process and the running event loop."""
        self._pid, self._loop = os.getpid(), asyncio.get_running_loop()

    def close(self) -> None:
        """Mark the client as closed."""
        self._loop = None

    def check(self) -> None:
        """Return if the caller may use the client. Without a running event loop, a caller may create iterators for
        later.

        Raises:
            ClientClosedError: the client is not connected, or belongs to another process or event loop.
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
