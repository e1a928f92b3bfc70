"""The shutdown of the server that runs in an event loop, which open streams are notified of."""

from __future__ import annotations

import asyncio
import signal
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

# How often the server's shutdown is checked: uvicorn's own interval.
CHECK_INTERVAL_S = 0.1


class Endable(Protocol):
    """An object that is notified of a shutdown."""

    def end(self) -> None:
        """End because the server shuts down."""


class ShutdownWatch:
    """Ends streams when the server of an event loop shuts down.

    ASGI notifies an application of the end only after its last response, and uvicorn waits for that without a limit. So
    an open stream would keep the server from stopping, however long it lasts. uvicorn (alone, with ``--reload``, with
    ``--workers``, and as gunicorn's worker) handles SIGTERM by a method of its ``Server``, whose state is read here.
    The watch changes nothing in the process, and does nothing under other servers.

    Args:
        server: uvicorn's ``Server``.
    """

    def __init__(self, server: Any) -> None:
        self._server = server
        self._streams: WeakSet[Endable] = WeakSet()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: Endable) -> None:
        """End ``stream`` at the shutdown, or immediately if it has begun."""
        self._streams.add(stream)
        if self._timer is None:
            self._check_shutdown()

    def discard(self, stream: Endable) -> None:
        """Remove a stream. Removing it twice does nothing."""
        self._streams.discard(stream)

    def _check_shutdown(self) -> None:
        self._timer = None
        if _is_ending(self._server):
            streams, self._streams = list(self._streams), WeakSet()
            for stream in streams:
                stream.end()
        elif self._streams:
            self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check_shutdown)


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
    """Return whether the server was stopped, or accepts no more connections, as at its limit of requests."""
    return server.should_exit or (
        bool(server.servers) and not any(listener.is_serving() for listener in server.servers)
    )
