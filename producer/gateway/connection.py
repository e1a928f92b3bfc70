"""How long a connection may make the gateway wait: between requests, and for the rest of one that has begun.

uvicorn limits the first alone. Invariant: whatever has come and is no whole request is limited by ``_waiting``; once
the request is whole, or is being answered, nothing here ends the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class LimitedConnection(HttpToolsProtocol):
    """uvicorn's connection, which is closed if a request's head takes longer than ``request_timeout_s``.

    The body of a request that is being answered is the application's to wait for: see ``RequestBody``. What is left of
    one that was answered already gets the same time as a head.

    Args:
        request_timeout_s: from the start of the connection, or the first byte of a later request.
        keep_alive_timeout_s: how long the connection may be idle between two requests.
    """

    def __init__(self, *args: Any, request_timeout_s: float, keep_alive_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeout_keep_alive = keep_alive_timeout_s  # uvicorn's own setting is in whole seconds
        self._request_timeout_s = request_timeout_s
        self._is_whole = False
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._is_whole = False
        super().data_received(data)
        if self._is_whole:
            self._stop_waiting()
        elif self._waiting is None and not self.transport.is_closing():
            self._wait()

    def on_message_begin(self) -> None:
        self._is_whole = False
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._is_whole = True
        super().on_message_complete()

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(self._request_timeout_s, self._expire)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _expire(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._waiting = None
            self.transport.close()
        else:
            self._wait()


def connection_class(*, request_timeout_s: float, keep_alive_timeout_s: float) -> Callable[..., LimitedConnection]:
    """Return what uvicorn makes a connection with."""
    return partial(LimitedConnection, request_timeout_s=request_timeout_s, keep_alive_timeout_s=keep_alive_timeout_s)
