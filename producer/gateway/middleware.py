"""Handle every request before and after its route: its id, its identity, the limit of concurrent requests, log and
metrics.

This is a plain ASGI application around another one, because Starlette's middleware base class would put a task and a
queue between each event of a stream and its socket.
"""

from __future__ import annotations

import re
import time
import uuid
from typing import Any

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...shared.errors import cut
from ...shared.process.log import get_logger, log_ids
from ...shared.values.names import MAX_NAME_CHARS
from ...shared.values.shown import MAX_SHOWN_CHARS, shown
from ..anthropic.errors import is_messages_path
from ..openai.errors import CLIENT_CLOSED_REQUEST, OpenAIError
from ..openai.unknown_fields import HEADER as IGNORED_HEADER
from ..openai.unknown_fields import counted_name, header_value
from ..web.connection import RequestBody
from .auth import Authenticator
from .http import error_response, trace_headers
from .metrics import Metrics

_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_NAME_CHARS}}}")
# Metric label of requests without a route: made-up paths must not create time series.
NO_ROUTE = "none"

log = get_logger(__name__)


class GatewayMiddleware:
    """Middleware around the routes.

    Args:
        public_paths: paths that need no API key.
        max_running: limit of concurrent requests; further ones are refused.
        request_timeout_s: time limit of a body; see ``RequestBody``.
    """

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        metrics: Metrics,
        *,
        public_paths: frozenset[str],
        max_running: int,
        request_timeout_s: float,
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._metrics = metrics
        self._public_paths = public_paths
        self._max_running = max_running
        self._request_timeout_s = request_timeout_s
        self._num_running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = RequestBody(receive, self._request_timeout_s, _late_body)
        exchange = Exchange(scope, send, body)
        state = scope["state"]
        state["started_at"], state["x_request_id"] = exchange.started_at, exchange.request_id
        self._num_running += 1
        self._metrics.in_flight.inc()
        ids = log_ids(None, exchange.request_id, trace_headers(exchange.headers))
        with structlog.contextvars.bound_contextvars(**ids):
            try:
                await self._serve_exchange(scope, body, exchange)
            finally:
                self._num_running -= 1
                self._metrics.in_flight.dec()
                self._record_outcome(scope, exchange)
                structlog.contextvars.unbind_contextvars("request_id")

    async def _serve_exchange(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        try:
            exchange.check_request_id()
            if scope["path"] not in self._public_paths:
                if self._num_running > self._max_running:
                    raise OpenAIError(
                        429,
                        "the gateway has reached its limit of running requests; try again later",
                        type="requests",
                        code="gateway_busy",
                    )
                scope["state"]["identity"] = await self._authenticator.identify(exchange.headers)
        except Exception as error:
            await error_response(error, scope)(scope, receive, exchange.send)
            return
        await self._app(scope, receive, exchange.send)

    def _record_outcome(self, scope: Scope, exchange: Exchange) -> None:
        """Count and log the outcome of a request."""
        seconds = time.perf_counter() - exchange.started_at
        status = CLIENT_CLOSED_REQUEST if scope["state"].get("has_left") else exchange.status
        route = scope["state"].get("route", NO_ROUTE)
        self._metrics.requests.labels(route, _method(scope), status).inc()
        self._metrics.latency.labels(route).observe(seconds)
        for field in scope["state"].get("ignored", ()):
            self._metrics.ignored.labels(counted_name(field)).inc()
        log.info(
            "http_request",
            method=scope["method"],
            path=cut(scope["path"], MAX_SHOWN_CHARS),
            status=status,
            seconds=round(seconds, 4),
        )


class Exchange:
    """A request and its response. It adds the request id, the names of ignored fields and the place in the queue to the
    head of the response, and records its status.

    If the body arrived too late, the connection is closed after the response, since the rest of the body is not
    awaited.
    """

    def __init__(self, scope: Scope, send: Send, body: RequestBody) -> None:
        self.started_at = time.perf_counter()
        self.headers = Headers(scope=scope)
        self._state: dict[str, Any] = scope.setdefault("state", {})
        self._sent_id = self.headers.get("x-request-id", "")
        is_usable = _REQUEST_ID.fullmatch(self._sent_id) is not None
        self.request_id = self._sent_id if is_usable else uuid.uuid4().hex
        self.status = 500
        self._send = send
        self._body = body
        self._is_messages = is_messages_path(scope["path"])

    def check_request_id(self) -> None:
        """Refuse an id that cannot be used in headers and logs, since its caller would search for it in vain.

        Raises:
            OpenAIError: 400, it is too long, or has other characters than visible ASCII.
        """
        if self._sent_id and self.request_id != self._sent_id:
            message = f"x-request-id must be 1 to {MAX_NAME_CHARS} visible ASCII characters, got {shown(self._sent_id)}"
            raise OpenAIError(400, message, param="x-request-id", code="invalid_request_id")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            if self._is_messages:
                headers["request-id"] = self.request_id
            if ignored := self._state.get("ignored"):
                headers[IGNORED_HEADER] = header_value(ignored)
            if place := self._state.get("place"):
                headers.update(place.headers)
            if read_rate_limits := self._state.get("read_rate_limits"):
                headers.update(await read_rate_limits())
            if self._body.is_late:
                headers["connection"] = "close"
        await self._send(message)


def _late_body(sentence: str) -> OpenAIError:
    message = f"{sentence}, or start the gateway with a longer --request-timeout"
    return OpenAIError(408, message, type="timeout", code="request_timeout")


def _method(scope: Scope) -> str:
    methods = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH")
    return scope["method"] if scope["method"] in methods else "other"
