"""Spans of HTTP requests: their attributes, and the spans inside of them."""

from __future__ import annotations

from typing import Any, cast

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.producer.gateway.app import http_spans
from penstock.producer.gateway.auth import Identity
from penstock.producer.gateway.http_spans import HttpSpans

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Traced:
    """An app behind the spans, that answers with a status and notes the headers that it gets."""

    def __init__(self, status: int = 200, *, fails: bool = False) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        (middleware,) = cast(list[Any], http_spans(provider, ["/health"]))
        assert middleware.cls is HttpSpans
        self.headers: list[dict[bytes, bytes]] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            self.headers.append(dict(scope["headers"]))
            scope["state"] = {"route": "/v1/files/{file_id}", "identity": Identity("acme"), "has_left": fails}
            if fails:
                raise RuntimeError("gone")
            await send({"type": "http.response.start", "status": status, "headers": []})

        self._app: Any = middleware.cls(app, *middleware.args, **middleware.kwargs)

    async def call(self, path: str, **headers: str) -> None:
        async def send(message: Any) -> None:
            return None

        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._app({"type": "http", "method": "GET", "path": path, "headers": pairs}, None, send)

    @property
    def spans(self) -> list[Any]:
        return list(self.exporter.get_finished_spans())


async def test_the_span_of_an_http_request_is_the_parent_of_its_generations() -> None:
    traced = Traced()
    await traced.call("/v1/files/secret", traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="a=b", accept="*/*")
    (span,) = traced.spans
    assert (span.name, f"{span.parent.span_id:016x}") == ("GET /v1/files/{file_id}", PARENT)
    assert (span.attributes["http.route"], span.attributes["http.response.status_code"]) == ("/v1/files/{file_id}", 200)
    assert (span.attributes["penstock.tenant"], span.status.is_ok) == ("acme", True)
    (headers,) = traced.headers
    assert headers[b"traceparent"].decode() == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert (headers[b"tracestate"], headers[b"accept"]) == (b"a=b", b"*/*")


@pytest.mark.parametrize(("status", "is_error"), [(404, False), (503, True)])
async def test_a_failure_of_ours_is_an_error(status: int, is_error: bool) -> None:
    traced = Traced(status)
    await traced.call("/v1/models")
    (span,) = traced.spans
    assert (span.attributes["error.type"], not span.status.is_ok) == (str(status), is_error)


async def test_spans_of_disconnected_clients_have_the_logged_status() -> None:
    traced = Traced(fails=True)
    with pytest.raises(RuntimeError):
        await traced.call("/v1/models")
    assert traced.spans[0].attributes["http.response.status_code"] == 499


async def test_probes_and_unsampled_requests_have_no_span_but_pass_on_their_context() -> None:
    traced = Traced()
    await traced.call("/health", traceparent=f"00-{TRACE}-{PARENT}-01")
    await traced.call("/v1/models", traceparent=f"00-{TRACE}-{PARENT}-00")
    assert traced.spans == []
    assert traced.headers[0][b"traceparent"].decode() == f"00-{TRACE}-{PARENT}-01"
    traceparent = traced.headers[1][b"traceparent"].decode()
    assert traceparent.startswith(f"00-{TRACE}-")
    assert int(traceparent[-2:], 16) & 1 == 0


def test_without_a_provider_nothing_is_around_the_routes() -> None:
    assert http_spans(None, []) == []
