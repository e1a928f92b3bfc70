"""Server-sent events: any asynchronous iterator of events as a ``text/event-stream``, under any web framework.

    return stream                                            Starlette, a gateway, plain ASGI: it is the response
    StreamingResponse(stream, headers=stream.headers)        FastAPI
    StreamingHttpResponse(stream, headers=stream.headers)    Django, in an async view

where ``stream`` is an ``EventStream`` of encoded events. ``encode_event`` makes the bytes of one; ``delta_events``
the events of a request's deltas, with ids by which a disconnected reader resumes (see ``reconnect``). Imports no web
framework.
Format: WHATWG HTML, section 9.2, server-sent events.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from ..shared.errors import PenstockError, ServerShutdownError, ValidationError
from ..shared.messages.deltas import Delta
from ..shared.values.json_lines import encode_line, escape_line_ends
from ..shared.values.shown import shown
from .reconnect import END, StreamPosition
from .web.shutdown import ShutdownWatch, shutdown_watch

KEEP_ALIVE_S = 15.0
# The status waits this long for early errors: of the enqueue, and of the worker's checks.
STATUS_WAIT_S = 0.5
# The default of browsers is three to five seconds.
RETRY_MS = 1000

# No empty line follows: after an event with an id, the openai package takes that for an event without data.
COMMENT = b":\n"
HEADERS: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    # Compression would delay events. "no-transform" keeps proxies from compressing, and "identity" middleware that
    # compresses any body without an encoding: Django's GZipMiddleware, brotli-asgi, nginx with gzip_types *.
    "cache-control": "no-store, no-transform",
    "content-encoding": "identity",
    # Turns off the buffering of nginx.
    "x-accel-buffering": "no",
}

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# All line ends of any reader: browsers accept the first three, Python's ``str.splitlines`` all of them.
_LINE_ENDS = re.compile(rb"\r\n|[\r\n\x0b\x0c\x1c\x1d\x1e]|\xc2\x85|\xe2\x80[\xa8\xa9]")
# The first bytes of the line ends, because searching for single bytes is faster.
_MAYBE_LINE_END = re.compile(rb"[\n\r\x0b\x0c\x1c\x1d\x1e\xc2\xe2]")


def encode_event(
    data: str | bytes, *, event: str | None = None, event_id: str | None = None, retry_ms: int | None = None
) -> bytes:
    """Return the bytes of one event, which every reader splits into the same lines.

    Args:
        data: JSON, which arrives as the same value; or text, whose line ends all arrive as ``\n``. Either a string or
            UTF-8 bytes. Line ends are those of Python's ``str.splitlines``.
        event: its type; a browser calls an event without a type "message".
        event_id: the value that the reader sends as ``Last-Event-ID`` when it reconnects.
        retry_ms: how long a reader waits before it reconnects.

    Raises:
        ValidationError: type or id contain a line end, or the id a NUL, so that a reader would ignore it.
    """
    fields = []
    for name, value in (("event", event), ("id", event_id)):
        if value is not None:
            if "\0" in value or _LINE_ENDS.search(value.encode()):
                raise ValidationError(f"{name} of an event must hold no line end and no NUL, got {shown(value)}")
            fields.append(f"{name}: {value}\n".encode())
    if retry_ms is not None:
        fields.append(b"retry: %d\n" % retry_ms)
    encoded = data.encode() if isinstance(data, str) else data
    if _MAYBE_LINE_END.search(encoded) is not None:
        encoded = _normalize_line_ends(encoded)
    if b"\n" not in encoded:
        return b"%bdata: %b\n\n" % (b"".join(fields), encoded)
    lines = b"".join(b"data: %b\n" % line for line in encoded.split(b"\n"))
    return b"%b%b\n" % (b"".join(fields), lines)


def _normalize_line_ends(data: bytes) -> bytes:
    """Replace line ends, by escapes in JSON and by ``\n`` in text."""
    if _LINE_ENDS.search(data) is None:
        return data
    escaped = escape_line_ends(data)
    if escaped != data and _is_json(data):
        data = escaped
    return _LINE_ENDS.sub(b"\n", data)


def _is_json(data: bytes) -> bool:
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def encode_error(error: Exception) -> bytes:
    """Return the last event of a failed stream, of type "failure", with code, message and whether it is retryable.

    An exception that is not Penstock's is reported without details. Its id is the id of the end, so that a browser does
    not reconnect to receive the error again. A retryable error has no id: the reader resumes at its last position.
    """
    if isinstance(error, PenstockError):
        body = {"code": error.code, "message": str(error), "retryable": error.retryable}
    else:
        body = {"code": "internal_error", "message": "the server failed", "retryable": False}
    return encode_event(encode_line(body), event="failure", event_id=None if body["retryable"] else END)


class DeltaEvent(msgspec.Struct, omit_defaults=True):
    """A delta as JSON: ``index`` of its first token; ``child`` unless it is the first answer's; the end if the delta
    has it.
    """

    index: int
    text: str
    num_tokens: int
    child: int = 0
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None


def encode_delta(delta: Delta) -> bytes:
    """Return a delta as a JSON object. A final delta also has the numbers of tokens."""
    event = DeltaEvent(
        index=delta.index,
        text=delta.text,
        num_tokens=len(delta.token_ids),
        child=delta.child,
        finish_reason=delta.finish_reason,
    )
    if delta.usage is not None:
        event.num_prompt_tokens = delta.usage.num_prompt_tokens
        event.num_output_tokens = delta.usage.num_output_tokens
    return encode_line(event)


async def delta_events(
    deltas: AsyncGenerator[Delta],
    position: StreamPosition | None = None,
    encode: Callable[[Delta], bytes] = encode_delta,
    *,
    retry_ms: int | None = RETRY_MS,
) -> AsyncGenerator[bytes]:
    """Iterate over the events of ``deltas``, and close it at the end.

    Args:
        position: what the reader already has, as for ``reconnect``; the start of one answer when None.
        encode: returns the data of an event.
        retry_ms: how long a browser waits before it reconnects, sent with the first event; the browser's default when
            None.
    """
    position = StreamPosition() if position is None else position
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            if position.advance(delta):
                yield encode_event(encode(delta), event_id=str(position), retry_ms=retry_ms)
                retry_ms = None


class EventStream:
    """A reply of server-sent events: an ASGI application, and an asynchronous iterator of its body.

    While no event arrives, a comment (or ``keep_alive``) keeps proxies from closing the connection. When the reader
    disconnects, the events are closed, and with them the stream of their request. An error before the first event is
    raised, so that the application can answer with a status. A later error is sent as the last event, and also raised
    if it is not Penstock's.

    When uvicorn shuts down, the stream ends with ``ServerShutdownError``; otherwise the server would wait for its end.

    Args:
        events: encoded events; closed at the end.
        headers: added to the default headers, or replacing them.
        error_event: encodes an error as the last event.
        keep_alive_s: time without events after which ``keep_alive`` is sent.
        keep_alive: a comment, or an event that readers ignore.
        status_wait_s: how long the status waits for the first event or an error; None without a limit.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        headers: Mapping[str, str] | None = None,
        error_event: Callable[[Exception], bytes] = encode_error,
        keep_alive_s: float = KEEP_ALIVE_S,
        keep_alive: bytes = COMMENT,
        status_wait_s: float | None = STATUS_WAIT_S,
    ) -> None:
        self.headers = {**HEADERS, **(headers or {})}
        self._events = events
        self._error_event = error_event
        self._keep_alive_s, self._keep_alive = keep_alive_s, keep_alive
        self._status_wait_s = status_wait_s
        self._next: asyncio.Future[bytes] | None = None
        self._is_over = False
        self._failure: Exception | None = None
        self._answering: asyncio.Task[None] | None = None
        self._watch: ShutdownWatch | None = None
        self._is_ending = False

    async def start(self) -> EventStream:
        """Wait up to ``status_wait_s`` for the first event, and return this stream.

        Await it first in a framework that sends the status by itself; as an ASGI application the stream does so itself.
        Raises the errors of the events until then.
        """
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._events))
            self._watch_shutdown()
            try:
                await asyncio.wait([self._next], timeout=self._status_wait_s)
            except asyncio.CancelledError:
                await self.aclose()
                raise
            is_refused = self._next.done() and not self._next.cancelled()
            error = self._next.exception() if is_refused else None
            if error is not None and not isinstance(error, StopAsyncIteration):
                await self.aclose()
                raise error
        return self

    def end(self) -> None:
        """End the stream early because the server shuts down. Its last event says so."""
        self._is_ending = True
        for task in (self._next, self._answering):
            if task is not None:
                task.cancel()

    async def aclose(self) -> None:
        """Close the events. Closing twice does nothing."""
        self._is_over = True
        if self._watch is not None:
            self._watch.discard(self)
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self._events.aclose()

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> bytes:
        if self._failure is not None:
            raise self._failure
        if self._is_over:
            raise StopAsyncIteration
        if self._next is None:
            if self._is_ending:
                return await self._last_event()
            self._next = asyncio.ensure_future(anext(self._events))
            self._watch_shutdown()
        try:
            # The wait may be cancelled or end without an event. The event stays awaited until the stream is closed.
            await asyncio.wait([self._next], timeout=self._keep_alive_s)
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if not self._next.done():
            return self._keep_alive
        ready, self._next = self._next, None
        try:
            return ready.result()
        except StopAsyncIteration:
            await self.aclose()
            raise
        except asyncio.CancelledError:
            if not self._is_ending:
                raise
            return await self._last_event()
        except Exception as error:
            await self.aclose()
            self._failure = None if isinstance(error, PenstockError) else error
            return self._error_event(error)

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer an HTTP request as an ASGI application."""
        self._answering = answering = asyncio.create_task(self._send_events(send))
        leaving = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
            await self.aclose()

    async def _send_events(self, send: Send) -> None:
        try:
            await self.start()
        except asyncio.CancelledError:
            self._absorb_own_cancellation()
        headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        failure: Exception | None = None
        last = b""
        keep_alive = _KeepAlive(send, self._keep_alive, self._keep_alive_s)
        try:
            if self._is_ending:
                raise _shutdown()
            async for event in self._rest():
                await keep_alive.send(event)
        except asyncio.CancelledError:
            self._absorb_own_cancellation()
            last = self._error_event(_shutdown())
        except Exception as error:
            failure, last = error, self._error_event(error)
        finally:
            keep_alive.stop()
        await send({"type": "http.response.body", "body": last, "more_body": False})
        if failure is not None and not isinstance(failure, PenstockError):
            raise failure

    def _watch_shutdown(self) -> None:
        if self._watch is None:
            self._watch = shutdown_watch()
            if self._watch is not None:
                self._watch.add(self)

    def _absorb_own_cancellation(self) -> None:
        """Absorb a cancellation of the running task by ``end``; raise any other."""
        task = asyncio.current_task()
        assert task is not None
        if not self._is_ending or task.uncancel():
            raise asyncio.CancelledError

    async def _last_event(self) -> bytes:
        await self.aclose()
        return self._error_event(_shutdown())

    async def _rest(self) -> AsyncGenerator[bytes]:
        """Iterate over the remaining events, including the awaited first one, without a task for each."""
        if self._next is not None:
            first, self._next = self._next, None
            try:
                yield await first
            except StopAsyncIteration:
                return
        async for event in self._events:
            yield event


def _shutdown() -> ServerShutdownError:
    return ServerShutdownError("the server shuts down; connect again to resume")


class _KeepAlive:
    """Sends pieces of a body, and ``piece`` whenever nothing was sent for ``every_s``."""

    def __init__(self, send: Send, piece: bytes, every_s: float) -> None:
        self._send = send
        self._piece = piece
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._task = asyncio.create_task(self._send_regularly())

    async def send(self, piece: bytes) -> None:
        self._sent_at = self._loop.time()
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    def stop(self) -> None:
        self._task.cancel()

    async def _send_regularly(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._sent_at + self._every_s - self._loop.time()))
            if self._loop.time() >= self._sent_at + self._every_s:
                await self.send(self._piece)


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return when the reader disconnects. The rest of the request's body is discarded."""
    while (await receive())["type"] != "http.disconnect":
        pass
