"""How our servers treat connections, with an application that the tests hold where they want."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.ops.dashboard.access import everybody
from penstock.ops.dashboard.edge import Edge
from penstock.ops.views.access import Access
from penstock.producer.control.secret_keys import Role
from penstock.producer.web.connection import MAX_HEAD_BYTES
from penstock.producer.web.server import listening, serve_app, web_config
from penstock.shared.errors import ConfigurationError

from ...processes import DEADLINE_S


class Held:
    """An application whose stream sends its second half when the test says so."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.app = Starlette(
            routes=[
                Route("/stream", self._stream),
                Route("/caller", self._caller),
                Route("/form", self._form, methods=["POST"]),
            ]
        )

    async def _stream(self, _: Request) -> Response:
        async def halves() -> AsyncIterator[str]:
            yield "first half, "
            await self.go_on.wait()
            yield "second half"

        return StreamingResponse(halves())

    async def _caller(self, request: Request) -> Response:
        assert request.client is not None
        return PlainTextResponse(request.client.host)

    async def _form(self, request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))


@asynccontextmanager
async def serving(app: ASGIApp, host: str = "127.0.0.1", **options: float) -> AsyncIterator[int]:
    """Serve an application in this loop; gives the port."""
    ready = asyncio.Event()
    starlette = app if isinstance(app, Starlette) else Starlette()
    with listening(host, 0) as listener:
        config = web_config(starlette, shutdown_timeout_s=1, **options)
        config.app = app
        server = asyncio.create_task(serve_app(starlette, config, listener, ready.set))
        await ready.wait()
        yield listener.getsockname()[1]
        server.cancel()
        with suppress(asyncio.CancelledError):
            await server


async def ask(port: int, request: bytes, host: str = "127.0.0.1") -> bytes:
    """Send ``request``, and return what comes until the server closes the connection."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    async with asyncio.timeout(DEADLINE_S):
        answer = await reader.read()
    writer.close()
    return answer


async def test_a_caller_of_http_1_0_gets_a_body_without_chunks() -> None:
    held = Held()
    held.go_on.set()
    async with serving(held.app) as port:
        head, _, body = (await ask(port, b"GET /stream HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
        assert body == b"first half, second half"
        assert b"transfer-encoding" not in head
        # Older servers close the connection without announcing it; ``ask`` has waited for that.
        head, _, body = (await ask(port, b"GET /caller HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
        assert body == b"127.0.0.1"
        assert b"content-length: 9" in head
        assert (await ask(port, b"HEAD /stream HTTP/1.0\r\n\r\n")).endswith(b"\r\n\r\n")


async def test_a_large_head_behind_a_running_stream_does_not_disturb_it() -> None:
    held = Held()
    async with serving(held.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await reader.readuntil(b"first half, ")
        writer.write(b"GET / HTTP/1.1\r\na: " + b"x" * 4 * MAX_HEAD_BYTES)
        await writer.drain()
        assert b"200" in await ask(port, b"GET /caller HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        held.go_on.set()
        async with asyncio.timeout(DEADLINE_S):
            answer += await reader.read()
        writer.close()
        assert answer.count(b"HTTP/1.1 ") == 1
        assert answer.endswith(b"second half\r\n0\r\n\r\n")


@pytest.mark.parametrize("sent", [b"", b"GET /ca", b"GET /caller HTTP/1.1\r\nhost: x\r\n"])
async def test_half_a_head_is_not_waited_for(sent: bytes) -> None:
    async with serving(Held().app, request_timeout_s=0.1) as port:
        assert await ask(port, sent) == b""


async def test_the_dashboard_does_not_wait_for_half_a_form() -> None:
    app = Starlette(routes=Held().app.routes)
    edge = Edge(app, everybody(Access("ann", Role.ADMIN)), request_timeout_s=0.1)
    async with serving(edge) as port:
        answer = await ask(port, b"POST /form HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhalf")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer
    assert answer.endswith(b"not complete after 0.1 s; send it at once")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs a host with IPv6")
async def test_all_addresses_of_ipv6_take_callers_of_ipv4_under_their_own_address() -> None:
    request = b"GET /caller HTTP/1.0\r\n\r\n"
    async with serving(Held().app, "::") as port:
        for host in ("127.0.0.1", "::1"):
            assert (await ask(port, request, host)).endswith(b"\r\n\r\n" + host.encode())


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs a host with IPv6")
def test_a_port_that_is_taken_on_ipv4_is_taken_for_all_addresses() -> None:
    with closing(socket.create_server(("0.0.0.0", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match="pass another"), listening("::", port):
            pytest.fail("it listens")
