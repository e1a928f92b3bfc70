"""The OpenAPI document, made of the operations and their structs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ..openai.errors import ErrorBody
from .operations import Operation

OPENAPI_VERSION = "3.1.0"
_ANY_ERRORS = (401, 404, 500, 503)
_ERROR_NAMES = {
    400: "A field is wrong; `error.param` names it.",
    401: "There is no API key, or not a valid one.",
    403: "The server was started without the option for that.",
    404: "There is no such thing.",
    405: "The path has no such method.",
    408: "The body did not come in time, or the request expired before it was started.",
    409: "The state of the thing forbids it.",
    413: "The body is too large.",
    429: "The queue is full, or the tenant is over its quota; `Retry-After` says when to come back.",
    499: "The request was cancelled.",
    500: "The request failed.",
    503: "Nobody serves the model now.",
}
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


def build_openapi(operations: Sequence[Operation], version: str) -> dict[str, Any]:
    """Return the document."""
    types = {ErrorBody: None}  # in order, each once
    for operation in operations:
        types |= {struct: None for struct in (operation.body, operation.response) if struct is not None}
    schemas, components = msgspec.json.schema_components(list(types), ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = _PARAMETER.sub(r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, schema_of)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "Penstock", "version": version, "description": "OpenAI's API over a durable queue."},
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
    of_body = () if operation.body is None else (408,)
    for status in sorted({*_ANY_ERRORS, *of_body, *operation.statuses}):
        error = {"application/json": {"schema": schema_of[ErrorBody]}}
        responses[str(status)] = {"description": _ERROR_NAMES[status], "content": error}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    names = _PARAMETER.findall(operation.path)
    parameters = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    if parameters or operation.parameters:
        described["parameters"] = [*parameters, *operation.parameters]
    if operation.body is not None:
        body = {operation.body_media_type: {"schema": schema_of[operation.body]}}
        described["requestBody"] = {"required": True, "content": body}
    if operation.is_public:
        described["security"] = []
    return described
