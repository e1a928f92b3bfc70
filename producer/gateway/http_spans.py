"""Record a span for each HTTP request, from its head to the last byte of its response."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...shared.tracing import attributes
from ...shared.tracing.spans import TRACE_PARENT, TRACE_STATE, context_of, headers_of
from ..openai.errors import CLIENT_CLOSED_REQUEST
from .http import trace_headers

_REPLACED = (TRACE_PARENT.encode(), TRACE_STATE.encode())


class HttpSpans:
    """ASGI middleware around the whole gateway. It replaces a request's ``traceparent`` with that of the span.

    ``untraced_paths`` are the paths of probes and scrapes, which get no spans.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer, untraced_paths: Iterable[str]) -> None:
        self._app = app
        self._tracer = tracer
        self._untraced_paths = frozenset(untraced_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._untraced_paths:
            await self._app(scope, receive, send)
            return
        parent = context_of(trace_headers(Headers(scope=scope)))
        span = self._tracer.start_span(scope["method"], parent, SpanKind.SERVER)
        headers = [(name.encode(), value.encode()) for name, value in headers_of(span).items()]
        scope = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] not in _REPLACED] + headers}
        if not span.is_recording():
            await self._app(scope, receive, send)
            return
        status = 500

        async def send_and_record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_record_status)
        finally:
            _set_attributes(span, scope, status)
            span.end()


def _set_attributes(span: Span, scope: Scope, status: int) -> None:
    """Set the attributes of ``span``: the request, its tenant and its outcome."""
    state = scope.get("state", {})
    if state.get("has_left"):
        status = CLIENT_CLOSED_REQUEST
    span.set_attributes(
        {
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "url.scheme": scope.get("scheme", "http"),
            "http.response.status_code": status,
        }
    )
    if route := state.get("route"):
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
    if identity := state.get("identity"):
        span.set_attribute(attributes.TENANT, identity.tenant)
    if status >= 400:
        span.set_attribute(attributes.ERROR, str(status))
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))
