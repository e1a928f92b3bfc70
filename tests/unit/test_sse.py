"""Server-sent events without a network: the bytes of an event, positions, and the ASGI side with a hand-made server."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
import uvicorn
from anthropic._streaming import SSEDecoder as AnthropicDecoder
from django.conf import settings
from django.http import HttpRequest, HttpResponseBase, StreamingHttpResponse
from django.middleware.gzip import GZipMiddleware as DjangoGZip
from django.test import AsyncRequestFactory
from openai._streaming import SSEDecoder as OpenAIDecoder
from starlette.middleware.gzip import GZipMiddleware as StarletteGZip

from penstock.producer import Delta, FinishReason
from penstock.producer.reconnect import StreamPosition
from penstock.producer.sse import (
    COMMENT,
    EventStream,
    delta_events,
    encode_delta,
    encode_error,
    encode_event,
)
from penstock.producer.web.shutdown import shutdown_watch
from penstock.shared.errors import QueueFullError, RequestFailedError, ValidationError

from ..processes import DEADLINE_S


class Server:
    """An ASGI server for one reply; ``leave`` ends the reader's connection."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self._left = asyncio.Event()

    def answer(self, stream: EventStream) -> asyncio.Task[None]:
        return asyncio.create_task(stream({"type": "http"}, self._receive, self.sent.put))

    def leave(self) -> None:
        self._left.set()

    async def body(self) -> bytes:
        """The next piece."""
        return (await self.sent.get())["body"]

    async def _receive(self) -> dict[str, Any]:
        await self._left.wait()
        return {"type": "http.disconnect"}


class Events:
    """Events that come when the test says so; knows whether it was left."""

    def __init__(self) -> None:
        self.coming: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.awaited = asyncio.Event()
        self.closed = False

    async def run(self) -> AsyncGenerator[bytes]:
        self.awaited.set()
        try:
            while (item := await self.coming.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b'{"a":1}', b'data: {"a":1}\n'),
        ("é", b"data: \xc3\xa9\n"),
        ("", b"data: \n"),
        ("a\nb\r\nc\rd", b"data: a\ndata: b\ndata: c\ndata: d\n"),
        ("a\n\n", b"data: a\ndata: \ndata: \n"),
        (" leading", b"data:  leading\n"),
        ("a\u2028b\x85c\x0bd\u00a0—", "data: a\ndata: b\ndata: c\ndata: d\u00a0—\n".encode()),
        ('{"a":\n"\u2028"}', b'data: {"a":\ndata: "\\u2028"}\n'),
        ('"\u2029"', b'data: "\\u2029"\n'),
    ],
)
def test_lines_of_data(data: str | bytes, lines: bytes) -> None:
    assert encode_event(data) == lines + b"\n"
    assert encode_event(data, event="x", event_id="7", retry_ms=50) == b"event: x\nid: 7\nretry: 50\n" + lines + b"\n"


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b", "a\u2028b"])
def test_a_field_with_a_line_end_is_refused(value: str) -> None:
    with pytest.raises(ValidationError, match="event of an event must hold no line end"):
        encode_event("x", event=value)
    with pytest.raises(ValidationError, match="id of an event must hold no line end"):
        encode_event("x", event_id=value)


def test_every_reader_splits_the_same_lines() -> None:
    """Over every character at which Python splits text."""
    ends = [char for char in map(chr, range(sys.maxunicode + 1)) if len(f"a{char}b".splitlines()) == 2]
    assert {"\n", "\r", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029"} <= set(ends)
    for end in ends:
        text = f"a{end}b"
        for event in (encode_event(encode_delta(Delta(text=text))), encode_error(RequestFailedError(text, code="x"))):
            lines = event.decode().splitlines()
            (data,) = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
            assert text in json.loads(data).values()
            assert lines == event.decode().removesuffix("\n").split("\n")
        whole = encode_event(json.dumps({"text": text}, ensure_ascii=False)).decode()
        assert json.loads(whole.removeprefix("data: ")) == {"text": text}
        assert len(whole.splitlines()) == 2
        assert encode_event(text).decode().splitlines() == ["data: a", "data: b", ""]


def test_positions_survive_a_round_trip_through_ids() -> None:
    position = StreamPosition(3)
    assert str(position) == "-1,-1,-1"
    assert position.advance(Delta(index=0, token_ids=[1, 2], child=1))
    assert position.advance(Delta(index=0, token_ids=[1], child=2, finish_reason=FinishReason.STOP))
    assert str(position) == "-1,1,end"
    again = StreamPosition.parse("-1,1,end", 3)
    assert (again.after[:2], again.ended) == ([-1, 1], False)
    assert not again.advance(Delta(index=1, child=2, finish_reason=FinishReason.STOP)), "its end was seen"
    assert StreamPosition.parse(None, 3).after == [-1, -1, -1]
    assert StreamPosition.parse("end", 3).ended


@pytest.mark.parametrize("wrong", ["x", "1,2", "-2", "1.5", " 1", "1,", "9" * 30, "٣", "end,end"])
def test_an_id_of_no_event_is_named(wrong: str) -> None:
    with pytest.raises(ValidationError, match="Last-Event-ID must be"):
        StreamPosition.parse(wrong)


def test_an_unexpected_error_is_sent_without_its_details() -> None:
    assert encode_error(RequestFailedError("no")) == (
        b'event: failure\nid: end\ndata: {"code":"request_failed","message":"no","retryable":false}\n\n'
    )
    assert b"secret" not in encode_error(RuntimeError("secret"))
    assert b"id:" not in encode_error(QueueFullError("full", retry_after_s=1))


async def test_a_whole_reply() -> None:
    async def deltas() -> AsyncGenerator[Delta]:
        yield Delta(index=0, token_ids=[5], text="a")
        yield Delta(index=1, token_ids=[6], text="b", finish_reason=FinishReason.STOP)

    server = Server()
    await server.answer(EventStream(delta_events(deltas()), headers={"x-request-id": "r"}))
    start = await server.sent.get()
    assert start["status"] == 200
    headers = dict(start["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert (headers[b"x-accel-buffering"], headers[b"x-request-id"]) == (b"no", b"r")
    first, last, end = [await server.sent.get() for _ in range(3)]
    assert first["body"] == b'id: 0\nretry: 1000\ndata: {"index":0,"text":"a","num_tokens":1}\n\n'
    assert last["body"].startswith(b"id: end\n")
    assert json.loads(last["body"].split(b"data: ")[1])["finish_reason"] == "stop"
    assert (end["body"], end["more_body"]) == (b"", False)


async def test_silence_is_filled_and_a_reader_that_leaves_closes_the_events() -> None:
    events, server = Events(), Server()
    answering = server.answer(EventStream(events.run(), keep_alive_s=0.01, status_wait_s=0.0))
    assert (await server.sent.get())["type"] == "http.response.start"
    assert [await server.body() for _ in range(2)] == [COMMENT] * 2
    events.coming.put_nowait(b"data: x\n\n")
    while await server.body() != b"data: x\n\n":
        pass
    server.leave()
    await answering
    assert events.closed


@pytest.mark.parametrize("decoder", [OpenAIDecoder, AnthropicDecoder])
def test_a_comment_between_events_is_no_event_to_a_package(decoder: Any) -> None:
    """They keep the id of the last event, so an empty line after a comment would end an event without data."""
    first, second = b"id: a:1\ndata: 1\n\n", b"id: a:2\ndata: 2\n\n"
    pieces = [first, COMMENT, b": x-penstock-queue-position=1\n", COMMENT, second]
    assert [event.data for event in decoder().iter_bytes(iter(pieces))] == ["1", "2"]


async def test_an_error_before_the_first_event_is_raised_for_the_http_status() -> None:
    events, server = Events(), Server()
    events.coming.put_nowait(QueueFullError("full", retry_after_s=1))
    with pytest.raises(QueueFullError):
        await server.answer(EventStream(events.run()))
    assert server.sent.empty()
    assert events.closed


@pytest.mark.parametrize("is_ours", [True, False])
async def test_a_later_error_is_the_last_event(is_ours: bool) -> None:
    events, server = Events(), Server()
    events.coming.put_nowait(b"data: x\n\n")
    events.coming.put_nowait(RequestFailedError("no") if is_ours else RuntimeError("bug"))
    answering = server.answer(EventStream(events.run()))
    await asyncio.wait([answering])
    error = answering.exception()
    assert error is None if is_ours else isinstance(error, RuntimeError)
    _, first, last = [server.sent.get_nowait() for _ in range(3)]
    assert first["body"] == b"data: x\n\n"
    assert last["body"].startswith(b"event: failure\n")
    assert (b"bug" in last["body"], last["more_body"]) == (False, False)
    assert events.closed


async def test_as_an_iterator_it_is_silent_for_no_longer_than_it_should_be() -> None:
    events = Events()
    stream = await EventStream(events.run(), keep_alive_s=0.01, status_wait_s=0.0).start()
    assert await anext(stream) == COMMENT
    events.coming.put_nowait(b"data: x\n\n")
    assert b"data: x\n\n" in [await anext(stream) for _ in range(3)]
    events.coming.put_nowait(RuntimeError("bug"))
    event = await anext(stream)
    while event == COMMENT:
        event = await anext(stream)
    assert b"internal_error" in event
    with pytest.raises(RuntimeError):
        await anext(stream)
    assert events.closed


async def test_cancelling_the_iteration_closes_the_events() -> None:
    events = Events()
    reading = asyncio.create_task(anext(EventStream(events.run())))
    await events.awaited.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert events.closed


async def test_compressing_middlewares_leave_events_unchanged() -> None:
    """Django's and Starlette's own; compressed, events are held back until there is enough of them."""
    events = [b"data: %d\n\n" % number for number in range(8)]

    async def some() -> AsyncGenerator[bytes]:
        for event in events:
            yield event

    if not settings.configured:
        settings.configure()

    async def view(_: HttpRequest) -> HttpResponseBase:
        stream = await EventStream(some()).start()
        return StreamingHttpResponse(stream, headers=stream.headers)

    request = AsyncRequestFactory().get("/", headers={"accept-encoding": "gzip"})
    middleware: Any = DjangoGZip(view)
    reply = await middleware(request)
    assert [bytes(piece) async for piece in reply] == events
    assert reply.headers["content-encoding"] == "identity"

    server = Server()
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"accept-encoding", b"gzip")]}
    await StarletteGZip(EventStream(some()), minimum_size=0)(scope, server._receive, server.sent.put)
    head = await server.sent.get()
    assert dict(head["headers"])[b"content-encoding"] == b"identity"
    assert [await server.body() for _ in range(9)] == [*events, b""]


SHUTDOWN = b'event: failure\ndata: {"code":"server_shutdown","message":"the server shuts down; '
SHUTDOWN += b'connect again to resume","retryable":true}\n\n'


@pytest.mark.parametrize("num_events", [0, 1])
async def test_an_asgi_reply_ends_when_its_server_shuts_down(num_events: int) -> None:
    events, server = Events(), Server()
    stream = EventStream(events.run(), status_wait_s=60.0)
    answering = server.answer(stream)
    await events.awaited.wait()
    for _ in range(num_events):
        events.coming.put_nowait(b"data: 1\n\n")
        assert (await server.sent.get())["status"] == 200
        assert await server.body() == b"data: 1\n\n"
    stream.end()
    await answering
    if not num_events:
        assert (await server.sent.get())["status"] == 200
    assert await server.sent.get() == {"type": "http.response.body", "body": SHUTDOWN, "more_body": False}
    assert events.closed


@pytest.mark.parametrize("num_events", [0, 1])
async def test_an_iterated_stream_ends_when_its_server_shuts_down(num_events: int) -> None:
    events = Events()
    stream = EventStream(events.run(), status_wait_s=0.0)
    for _ in range(num_events):
        events.coming.put_nowait(b"data: 1\n\n")
        assert await anext(stream) == b"data: 1\n\n"
    last = asyncio.create_task(anext(stream))
    await events.awaited.wait()
    stream.end()
    assert await last == SHUTDOWN
    assert events.closed
    assert [event async for event in stream] == []


async def test_a_stream_ends_between_two_events_when_its_server_shuts_down() -> None:
    events = Events()
    stream = EventStream(events.run())
    events.coming.put_nowait(b"data: 1\n\n")
    assert await anext(stream) == b"data: 1\n\n"
    stream.end()
    assert [event async for event in stream] == [SHUTDOWN]
    assert events.closed


async def test_only_a_server_of_uvicorn_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shutdown_watch() is None
    server = uvicorn.Server(uvicorn.Config("app"))
    server.servers = []
    monkeypatch.setattr(signal, "getsignal", lambda _: server.handle_exit)
    watch = shutdown_watch()
    assert watch is not None
    assert shutdown_watch() is watch
    left_events = Events()
    stream, left = EventStream(Events().run()), EventStream(left_events.run())
    waiting = asyncio.create_task(anext(left))
    await left_events.awaited.wait()
    watch.discard(left)
    server.handle_exit(signal.SIGTERM, None)
    async with asyncio.timeout(DEADLINE_S):
        assert [event async for event in stream] == [SHUTDOWN]
    assert not waiting.done()
    left.end()
    assert await waiting == SHUTDOWN
