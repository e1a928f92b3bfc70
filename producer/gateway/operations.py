"""Describe routes, and build the OpenAPI document from them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ..openai.errors import ErrorBody

# A response is any ASGI application, since that of a stream is not a ``Response``.
Handler = Callable[[Request], Awaitable[ASGIApp]]

OPENAPI_VERSION = "3.1.0"
_ANY_ERRORS = (401, 404, 500, 503)
_ERROR_NAMES = {
    400: "A field is wrong; `error.param` names it.",
    401: "The API key is missing or invalid.",
    403: "The server was started without the option that allows this.",
    404: "Not found.",
    405: "The path does not support this method.",
    408: "The body did not arrive in time, or the request expired before its start; retry after `Retry-After` seconds.",
    409: "The object is in a state that does not allow this, or the `Idempotency-Key` was used for another body.",
    413: "The body is too large.",
    429: "The queue is full, or the tenant is over its quota; retry after `Retry-After` seconds.",
    499: "The request was cancelled.",
    500: "The request failed.",
    503: "No engine serves the model at present; retry after `Retry-After` seconds.",
}
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """A method of one path. Each family of endpoints has a tuple of them.

    Args:
        path: in Starlette's form, with ``{name}`` or ``{name:path}``.
        body: struct of the request's JSON; None without one. ``body_media_type`` is set if it is not JSON.
        response: struct of a successful response; None if ``media_type`` alone describes it.
        streams: whether ``stream=true`` returns events instead.
        error: struct of an error response.
        statuses: possible error statuses, in addition to 401, 404, 500 and 503, which all operations have.
        is_public: whether the path needs no API key.
        parameters: entries of OpenAPI's ``parameters``, in addition to those in the path.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    body: Any = None
    response: Any = None
    status: int = 200
    media_type: str = "application/json"
    body_media_type: str = "application/json"
    streams: bool = False
    error: type[msgspec.Struct] = ErrorBody
    statuses: tuple[int, ...] = ()
    is_public: bool = False
    parameters: tuple[dict[str, Any], ...] = ()


def build_openapi(operations: Sequence[Operation], version: str) -> dict[str, Any]:
    """Return the OpenAPI document of ``operations``."""
    types: dict[Any, None] = {}  # an ordered set
    for operation in operations:
        structs = (operation.error, operation.body, operation.response)
        types |= {struct: None for struct in structs if struct is not None}
    schemas, components = msgspec.json.schema_components(list(types), ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = _PARAMETER.sub(r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, schema_of)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "Penstock",
            "version": version,
            "description": "OpenAI's and Anthropic's APIs over a durable queue.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(operation: Operation, schema_of: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media_type: {}}
    if operation.response is not None:
        content = {operation.media_type: {"schema": schema_of[operation.response]}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {str(operation.status): {"description": "Success.", "content": content}}
    body_statuses = () if operation.body is None else (408,)
    for status in sorted({*_ANY_ERRORS, *body_statuses, *operation.statuses}):
        error = {"application/json": {"schema": schema_of[operation.error]}}
        responses[str(status)] = {"description": _ERROR_NAMES[status], "content": error}
    description: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    names = _PARAMETER.findall(operation.path)
    parameters = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    if parameters or operation.parameters:
        description["parameters"] = [*parameters, *operation.parameters]
    if operation.body is not None:
        body = {operation.body_media_type: {"schema": schema_of[operation.body]}}
        description["requestBody"] = {"required": True, "content": body}
    if operation.is_public:
        description["security"] = []
    return description
