"""Notices that the web server which runs this process shuts down, so that open streams end then.

ASGI tells an application of the end only after its last response, and uvicorn waits for that without a limit. So an
open stream would keep the server from ending, however long it lasts. uvicorn (alone, with ``--reload``, with
``--workers``, and as gunicorn's worker) handles SIGTERM by a method of its ``Server``, whose state is read here.
Nothing is changed in the process, and nothing happens under other servers.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

# As often as uvicorn itself looks.
LOOK_INTERVAL_S = 0.1


class Endable(Protocol):
    """What is told of a shutdown."""

    def end(self) -> None:
        """The server shuts down."""


class ShutdownWatch:
    """Tells streams when the server of an event loop shuts down.

    Args:
        server: uvicorn's.
    """

    def __init__(self, server: Any) -> None:
        self._server = server
        self._streams: WeakSet[Endable] = WeakSet()
        self._look: asyncio.TimerHandle | None = None

    def add(self, stream: Endable) -> None:
        """Tell ``stream`` of the shutdown, at once if it has begun."""
        self._streams.add(stream)
        if self._look is None:
            self._check()

    def discard(self, stream: Endable) -> None:
        """Forget a stream; doing it twice does nothing."""
        self._streams.discard(stream)

    def _check(self) -> None:
        self._look = None
        if _is_ending(self._server):
            streams, self._streams = list(self._streams), WeakSet()
            for stream in streams:
                stream.end()
        elif self._streams:
            self._look = asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._check)


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, ShutdownWatch] = WeakKeyDictionary()


def shutdown_watch() -> ShutdownWatch | None:
    """Return the watch of the running event loop; None if its server cannot be watched."""
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if not isinstance(getattr(server, "should_exit", None), bool) or not hasattr(server, "servers"):
        return None
    loop = asyncio.get_running_loop()
    watch = _watches.get(loop)
    if watch is None:
        watch = _watches[loop] = ShutdownWatch(server)
    return watch


def _is_ending(server: Any) -> bool:
    """Whether it was told to end, or accepts no more connections, as at its limit of requests."""
    return server.should_exit or (bool(server.servers) and not any(one.is_serving() for one in server.servers))
