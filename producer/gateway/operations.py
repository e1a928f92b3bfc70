"""What a route is: its place, what it does, and what the OpenAPI document says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

# A response is an ASGI application; that of a stream is no ``Response``.
Handler = Callable[[Request], Awaitable[ASGIApp]]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path; each family of endpoints has a tuple of them.

    Args:
        path: as Starlette has it, with ``{name}`` or ``{name:path}``.
        body: the struct of the request's JSON, None without one. ``body_media_type`` says what else it is.
        response: the struct of a success, None for one that is described by ``media_type`` alone.
        streams: whether ``stream=true`` gets events instead.
        statuses: errors that it may answer with, beside 401, 404, 500 and 503 which any may.
        is_public: needs no API key.
        parameters: further parts of OpenAPI's ``parameters``, beside those in the path.
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
    statuses: tuple[int, ...] = ()
    is_public: bool = False
    parameters: tuple[dict[str, Any], ...] = ()
