"""Bodies, responses and errors over HTTP, in the form that OpenAI's API has."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ...shared.log import get_logger
from ..inputs.options import RequestOptions
from ..openai.errors import OpenAIError, cancelled, error_of
from .gateway import Gateway

JSON = "application/json"
_TRACE_HEADERS = ("traceparent", "tracestate")

_encoder = msgspec.json.Encoder()
log = get_logger(__name__)
T = TypeVar("T")


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves ``request``."""
    return request.app.state.gateway


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response of a struct or plain data."""
    return Response(_encoder.encode(body), status, headers, JSON)


def error_response(error: BaseException) -> Response:
    """The response that tells an error; one that nobody foresaw goes to the log with its traceback."""
    told = error_of(error)
    if told.status == 500 and told.error_code == "internal_error":
        log.error("http_request_failed", exc_info=error)
    return json_response(told.body, told.status, told.headers)


async def http_exception(_: Request, error: Exception) -> Response:
    """What Starlette itself refuses: no such path, another method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(OpenAIError(404, "there is no such path; see /openapi.json", code="unknown_url"))
    told = OpenAIError(error.status_code, str(error.detail).lower(), code="http_error")
    response = error_response(told)
    response.headers.update(error.headers or {})
    return response


async def any_exception(_: Request, error: BaseException) -> Response:
    """What a route raised."""
    if isinstance(error, ClientDisconnect):
        return error_response(cancelled())
    return error_response(error)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body.

    Raises:
        OpenAIError: 413, it is larger than ``max_bytes``; no more than that was read.
        ClientDisconnect: the client left before its end.
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


def trace_headers(headers: Headers) -> dict[str, str]:
    """The headers that say which trace a request belongs to (W3C Trace Context); empty without one."""
    return {name: headers[name] for name in _TRACE_HEADERS if name in headers} if "traceparent" in headers else {}


def add_ids(options: RequestOptions, request: Request, request_id: str) -> None:
    """Say in ``options`` what a request is called by who asked and in which trace, and in our log what we call it."""
    options["external_req_id"] = request.state.x_request_id
    if found := trace_headers(request.headers):
        options["trace_headers"] = found
    note_request_id(request_id)


def note_request_id(request_id: str) -> None:
    """Name the client's request in every line of the log that is about the HTTP request that is being served."""
    structlog.contextvars.bind_contextvars(request_id=request_id)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns, or cancel it when the client leaves; the body must have been read.

    Raises:
        OpenAIError: 499, the client left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise cancelled()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(leaving, working, return_exceptions=True)


async def disconnected(request: Request) -> None:
    """Return when the client has left; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _too_large(max_bytes: int) -> OpenAIError:
    return OpenAIError(413, f"the body must have at most {max_bytes} bytes", code="body_too_large")
