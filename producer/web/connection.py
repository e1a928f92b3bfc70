"""Limits on a connection: the size of a request's head, the time for it and for a body, and the time between two
requests.

uvicorn itself limits only the time between two requests.

Invariants:

- Bytes that are not a complete request are limited in time by ``_timer``. Once a request is complete, or is being
  answered, no timer here closes the connection.
- Bytes outside of bodies are limited in number: the parser collects them before the application sees the request,
  and its time grows with the square of their number.
"""

from __future__ import annotations

import asyncio
import ipaddress
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.types import Message, Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

REQUEST_TIMEOUT_S = 30.0
# A body at this rate, 64 kbit/s, may take any time: uploads are long, and links may be slow.
MIN_BYTES_PER_S = 8 * 1024

# Longer than callers keep an idle connection: httpx and the openai package 5 s, aiohttp 15 s, nginx and Amazon's load
# balancer 60 s, Go 90 s, Caddy 120 s. If the server closes first, it may close while a request is on its way.
KEEP_ALIVE_TIMEOUT_S = 130.0
MAX_HEAD_BYTES = 64 * 1024
# For each byte of a body, the framing may have this many: a chunk of one byte has five.
MAX_FRAMING_PER_BODY_BYTE = 8
# Received data is parsed in pieces of this size, so that the limits are checked in between.
_PIECE_BYTES = 16 * 1024
# How long the rest of a refused request is read and dropped. If the server closed immediately, the kernel's reset could
# reach the caller before the response.
_LINGER_S = 2.0
_REFUSAL = f"the head of a request must have at most {MAX_HEAD_BYTES} bytes\n".encode()


class RequestBody:
    """An ASGI ``receive`` that waits ``timeout_s`` in total, and one more second for each 8 KiB received.

    Only time in which the application waits counts, not time in which it works and the network waits. After the end of
    the body, messages are passed on unchanged.

    Args:
        late: creates the exception for a late body from a reason about it.
    """

    def __init__(self, receive: Receive, timeout_s: float, late: Callable[[str], Exception]) -> None:
        self._receive = receive
        self._timeout_s = timeout_s
        self._late = late
        self._is_complete = False
        self.time_left_s = timeout_s
        self.is_late = False

    async def __call__(self) -> Message:
        """Return the next message.

        Raises:
            Exception: that of ``late``; the body did not arrive in time.
        """
        if self._is_complete:
            return await self._receive()
        loop = asyncio.get_running_loop()
        since = loop.time()
        try:
            async with asyncio.timeout(self.time_left_s):
                message = await self._receive()
        except TimeoutError:
            self.is_late = True
            reason = f"the body of the request was not complete after {self._timeout_s:g} s; send it at once"
            raise self._late(reason) from None
        self.time_left_s += len(message.get("body", b"")) / MIN_BYTES_PER_S - (loop.time() - since)
        self._is_complete = not message.get("more_body", False)
        return message


class LimitedConnection(HttpToolsProtocol):
    """uvicorn's connection with limits.

    - A head of more than ``MAX_HEAD_BYTES``, including the request line, is answered with 431.
    - A body whose framing (chunk sizes, chunk extensions, trailers) is too large for its size closes the connection.
    - A head that is late closes the connection. The application waits for the body; see ``RequestBody``. The rest of a
      body after its response gets the same time as a head.

    Args:
        request_timeout_s: time for a head, from the start of the connection or the first byte of a later request.
        keep_alive_timeout_s: how long the connection may be idle between two requests.
    """

    def __init__(self, *args: Any, request_timeout_s: float, keep_alive_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeout_keep_alive = keep_alive_timeout_s  # uvicorn's own setting is in whole seconds
        self._request_timeout_s = request_timeout_s
        self._is_complete = False
        self._timer: asyncio.TimerHandle | None = None
        self._has_head = False
        self._has_begun_in_piece = False
        self._num_piece_body_bytes = 0
        self._num_framing_bytes = 0
        self._max_framing_bytes = MAX_HEAD_BYTES
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if self.client is not None:
            self.client = (_plain_address(self.client[0]), self.client[1])
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._is_complete = False
        if len(data) <= _PIECE_BYTES:
            self._feed(data)
        else:
            view = memoryview(data)
            for start in range(0, len(view), _PIECE_BYTES):
                if self._is_refused or self.transport.is_closing():
                    break
                self._feed(view[start : start + _PIECE_BYTES])
        if self._is_complete:
            self._stop_timer()
        elif self._timer is None and not self.transport.is_closing():
            self._start_timer()

    def _feed(self, piece: bytes | memoryview) -> None:
        self._has_begun_in_piece, self._num_piece_body_bytes = False, 0
        super().data_received(piece)  # type: ignore[arg-type]  # the parser takes any buffer
        if self._has_begun_in_piece:
            # The part of the piece that belongs to the new request is unknown, and small.
            return
        self._max_framing_bytes += MAX_FRAMING_PER_BODY_BYTE * self._num_piece_body_bytes
        self._num_framing_bytes += len(piece) - self._num_piece_body_bytes
        if self._num_framing_bytes > self._max_framing_bytes and not self.transport.is_closing():
            self._refuse_head()

    def on_message_begin(self) -> None:
        self._is_complete = self._has_head = False
        self._has_begun_in_piece = True
        self._num_framing_bytes, self._max_framing_bytes = 0, MAX_HEAD_BYTES
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._has_head = True
        self._num_framing_bytes = 0
        super().on_headers_complete()
        if self.scope["http_version"] in ("0.9", "1.0"):
            _close_after(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_piece_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_complete = True
        super().on_message_complete()

    def _refuse_head(self) -> None:
        """Read nothing more from this connection, and answer 431 if no other response is in progress."""
        self._is_refused = True
        if self._has_head:
            self.transport.close()
        elif self.cycle is not None and not self.cycle.response_complete:
            # An earlier request of this connection is still being answered.
            self.cycle.keep_alive = False
        else:
            self._unset_keepalive_if_required()
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_REFUSAL), _REFUSAL)
            )
            self._stop_timer()
            self._timer = self.loop.call_later(min(_LINGER_S, self._request_timeout_s), self._expire)
            if self.transport.can_write_eof():
                self.transport.write_eof()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._request_timeout_s, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._timer = None
            self.transport.close()
        else:
            self._start_timer()


def connection_class(
    *, request_timeout_s: float = REQUEST_TIMEOUT_S, keep_alive_timeout_s: float = KEEP_ALIVE_TIMEOUT_S
) -> Callable[..., LimitedConnection]:
    """Return a factory of connections for uvicorn."""
    return partial(LimitedConnection, request_timeout_s=request_timeout_s, keep_alive_timeout_s=keep_alive_timeout_s)


def _close_after(cycle: RequestResponseCycle) -> None:
    """Mark the end of the response's body by closing the connection.

    HTTP/1.0 clients do not support chunked encoding, which uvicorn would use.
    """
    send: Any = cycle.send
    cycle.chunked_encoding = False
    cycle.expected_content_length = sys.maxsize

    async def send_without_framing(message: Any) -> None:
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        await send({**message, "more_body": True} if is_last else message)
        if is_last and not cycle.response_complete:
            cycle.response_complete = True
            cycle.message_event.set()
            cycle.transport.close()
            cycle.on_response()

    cycle.send = send_without_framing


def _plain_address(host: str) -> str:
    """Return an IPv4 address in its own form, even if an IPv6 socket accepted it."""
    if not host.startswith("::ffff:"):
        return host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return host if mapped is None else str(mapped)
