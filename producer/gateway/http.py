"""The state of a running gateway; reading of bodies, and responses and errors in the form of OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from ...shared.connection import CommandConnection
from ...shared.process.log import get_logger
from .. import Client
from ..anthropic.errors import error_body
from ..batches import BatchStore
from ..control.rate_limits import RateLimits
from ..inputs.options import RequestOptions
from ..io_processors import IOProcessors
from ..openai.errors import EXPIRED, OpenAIError, cancelled, error_of
from ..openai.parsers import ModelParsers
from ..openai.responses.service import Responses
from ..openai.unknown_fields import decode_known
from .auth import Authenticator
from .images import ImageFetcher
from .metrics import Family, Metrics
from .reservations import HEADER, IdempotencyKeys, digest_of
from .settings import GatewaySettings

JSON = "application/json"
_TRACE_HEADERS = ("traceparent", "tracestate")
_encoder = msgspec.json.Encoder()
T = TypeVar("T")
B = TypeVar("B", bound=msgspec.Struct)
log = get_logger(__name__)


class Gateway(msgspec.Struct, frozen=True):
    """A running gateway. ``app.build_app`` creates it at startup; routes get it with ``gateway_of(request)``.

    Args:
        metrics: counters of this process.
        read_metrics: returns the metrics of the whole gateway, of all its processes.
    """

    settings: GatewaySettings
    client: Client
    authenticator: Authenticator
    metrics: Metrics
    read_metrics: Callable[[], Awaitable[list[Family]]]
    parsers: ModelParsers
    responses: Responses
    batches: BatchStore
    connection: CommandConnection
    images: ImageFetcher
    io_processors: IOProcessors
    idempotency: IdempotencyKeys
    rate_limits: RateLimits


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that serves ``request``."""
    return request.app.state.gateway


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with ``body``, a struct or plain data, as JSON."""
    return Response(_encoder.encode(body), status, headers, JSON)


def error_response(error: BaseException, scope: Scope) -> Response:
    """Return the response that reports an error, in the form of the path's API. Logs an unexpected one with its
    traceback."""
    api_error = error_of(error)
    if api_error.status == 500 and api_error.error_code == "internal_error":
        log.error("http_request_failed", exc_info=error)
    body = error_body(scope["path"], api_error, scope["state"]["x_request_id"])
    return json_response(body, api_error.status, api_error.headers)


async def http_exception(request: Request, error: Exception) -> Response:
    """Return the response for an error that Starlette itself raised: an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(OpenAIError(404, "unknown path; see /openapi.json", code="unknown_url"), request.scope)
    api_error = OpenAIError(error.status_code, str(error.detail).lower(), code="http_error")
    response = error_response(api_error, request.scope)
    response.headers.update(error.headers or {})
    return response


async def any_exception(request: Request, error: BaseException) -> Response:
    """Return the response for an exception of a route."""
    if isinstance(error, ClientDisconnect):
        error = cancelled()
    if isinstance(error, OpenAIError) and error.error_code == EXPIRED and hasattr(request.state, "place"):
        error.retry_after_s = await request.state.place.retry_after_s()
    return error_response(error, request.scope)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body.

    Raises:
        OpenAIError: 413, it is larger than ``max_bytes``; no more than that was read.
        ClientDisconnect: the client disconnected before the body was complete.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


async def read_struct(request: Request, body_type: type[B]) -> B:
    """Return the JSON body of a request as a struct. Note its ignored fields, and its digest if the request has a key.

    Raises:
        OpenAIError: as ``read_body``.
        msgspec.MsgspecError: it is not JSON, or does not have the required form.
    """
    settings, state = gateway_of(request).settings, request.state
    data = await read_body(request, settings.max_body_bytes)
    body, state.ignored = decode_known(data, body_type, strict=settings.strict_fields)
    if HEADER in request.headers:
        state.body_digest = digest_of(state.route, msgspec.json.encode(body, order="deterministic").decode())
    return body


def trace_headers(headers: Headers) -> dict[str, str]:
    """Return the headers that name the trace of a request (W3C Trace Context); empty without one."""
    return {name: headers[name] for name in _TRACE_HEADERS if name in headers} if "traceparent" in headers else {}


def add_ids(options: RequestOptions, request: Request, request_id: str) -> None:
    """Add the caller's request id and trace to ``options``, and log the HTTP request under ``request_id``."""
    options["external_req_id"] = request.state.x_request_id
    if context := trace_headers(request.headers):
        options["trace_headers"] = context
    bind_request_id(request_id)


def bind_request_id(request_id: str) -> None:
    """Add ``request_id`` to every log line about the current HTTP request."""
    structlog.contextvars.bind_contextvars(request_id=request_id)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, or cancel it when the client disconnects. The body must have been read.

    Raises:
        OpenAIError: 499, the client disconnected.
    """
    work_task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(wait_for_disconnect(request))
    try:
        await asyncio.wait((work_task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            return work_task.result()
        raise cancelled()
    finally:
        disconnect.cancel()
        work_task.cancel()
        await asyncio.gather(disconnect, work_task, return_exceptions=True)


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client has disconnected. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _too_large(max_bytes: int) -> OpenAIError:
    return OpenAIError(413, f"the body must have at most {max_bytes} bytes", code="body_too_large")
