"""An answer as server-sent events: one write for each delta, an id on each event, comments while nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import msgspec
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...producer.openai.errors import error_of
from ...producer.openai.prepared import ChunkMaker, Prepared
from .generations import PromptDelta
from .http import error_response
from .position import Position

# A request that is refused is so within moments, with a status of its own; one that waits longer has its head sent.
HEAD_AFTER_S = 2.0
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]

_encode = msgspec.json.Encoder().encode
log = structlog.get_logger()


async def events(
    deltas: AsyncGenerator[PromptDelta], prepared: Prepared, chunks: ChunkMaker, position: Position
) -> AsyncGenerator[bytes]:
    """Iterate over the encoded events of a stream that stands at ``position``; ends with [DONE].

    What ``position`` has is fed to ``chunks`` all the same, for its state, and not told again.
    """
    async with aclosing(deltas):
        with prepared.naming_fields():
            async for prompt, delta in deltas:
                answer = prompt * prepared.params.n + delta.child
                is_told = position.has(answer, delta)
                chunk = chunks.feed(delta, prompt)
                if is_told:
                    continue
                position.advance(answer, delta)
                if chunk is not None:
                    yield b"id: %b\ndata: %b\n\n" % (str(position).encode(), _encode(chunk))
    usage = chunks.end()
    if usage is not None and not position.has_usage:
        position.has_usage = True
        yield b"id: %b\ndata: %b\n\n" % (str(position).encode(), _encode(usage))
    yield DONE


class EventStream(Response):
    """The response; it closes ``frames`` when the client leaves, or at the end.

    An error before the first event is a response with its own status, one after it is an event.
    ``on_first`` is called when the first event goes out.
    """

    def __init__(self, frames: AsyncGenerator[bytes], *, keep_alive_s: float, on_first: Callable[[], None]) -> None:
        self._frames = frames
        self._keep_alive_s = keep_alive_s
        self._on_first = on_first
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(scope, receive, send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            else:
                scope["state"]["has_left"] = True
        finally:
            leaving.cancel()
            sending.cancel()
            await asyncio.gather(leaving, sending, return_exceptions=True)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._frames):
            coming = asyncio.ensure_future(anext(self._frames))
            try:
                await self._send_rest(coming, scope, receive, send)
            finally:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)

    async def _send_rest(self, first: asyncio.Future[bytes], scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.wait((first,), timeout=HEAD_AFTER_S)
        if first.done() and (error := first.exception()) is not None:
            await error_response(error)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        write = _writer(send)
        try:
            while not first.done():
                await asyncio.wait((first,), timeout=self._keep_alive_s)
                if not first.done():
                    await write(KEEP_ALIVE)
            self._on_first()
            await write(first.result())
            await self._relay(write)
        except Exception as error:
            told = error_of(error)
            log.warning("a stream failed", error=str(error), status=told.status)
            await write(b"data: %b\n\n%b" % (_encode(told.body), DONE))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _relay(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write what comes after the first event, and a comment whenever nothing has come for a while."""
        last_write = asyncio.get_running_loop().time()
        loop = asyncio.get_running_loop()

        async def keep_alive() -> None:
            while True:
                await asyncio.sleep(max(0.0, last_write + self._keep_alive_s - loop.time()))
                if loop.time() - last_write >= self._keep_alive_s:
                    await write(KEEP_ALIVE)

        keeping = asyncio.ensure_future(keep_alive())
        try:
            async for frame in self._frames:
                last_write = loop.time()
                await write(frame)
        finally:
            keeping.cancel()


def _writer(send: Send) -> Callable[[bytes], Awaitable[None]]:
    async def write(frame: bytes) -> None:
        await send({"type": "http.response.body", "body": frame, "more_body": True})

    return write


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
