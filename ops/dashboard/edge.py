"""Middleware around all pages: authentication, protection against foreign origins, and security headers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...producer.web.connection import REQUEST_TIMEOUT_S, RequestBody
from ...shared.deployment.audit import Actor, ActorSource, acting_as
from ..views.access import Access
from .access import KeyAccess, Resolve
from .render import query

# Scripts, styles, images and connections only from this server; nothing inline; no framing.
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_SAFE = ("GET", "HEAD")
# Paths that need no authentication.
_PUBLIC = ("/static/", "/login")


class Edge:
    """ASGI middleware that puts an ``Access`` into the request's state, or refuses the request.

    Args:
        hosts: allowed host names; empty for any. Without authentication they protect against DNS rebinding: a page of
            another site whose name resolves to this machine.
        request_timeout_s: time limit for the body of a request.
    """

    def __init__(
        self, app: ASGIApp, resolve: Resolve, hosts: Sequence[str] = (), request_timeout_s: float = REQUEST_TIMEOUT_S
    ) -> None:
        self._app = app
        self._resolve = resolve
        self._hosts = hosts
        self._request_timeout_s = request_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        body = RequestBody(receive, self._request_timeout_s, _late_body)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
                if body.is_late:
                    headers["connection"] = "close"
            await send(message)

        refusal = await self._refusal_of_request(scope, connection)
        if refusal is not None:
            await refusal(scope, body, send_with_headers)
            return
        access: Access | None = scope["state"].get("access")
        address = connection.client.host if connection.client else ""
        # An app that mounts the pages authenticates by itself.
        source = getattr(self._resolve, "source", ActorSource.APP) if access else ActorSource.NOBODY_ASKED
        name = access.user if access else "nobody"
        with acting_as(Actor(name=name, via="dashboard", address=address, source=source)):
            await self._app(scope, body, send_with_headers)

    async def _refusal_of_request(self, scope: Scope, connection: HTTPConnection) -> Response | None:
        """Store the access in the request's state, or return the response that refuses the request."""
        if self._hosts and urlsplit(f"//{connection.headers.get('host', '')}").hostname not in self._hosts:
            return PlainTextResponse(f"call this dashboard by {' or '.join(self._hosts)}", 421)
        if scope["method"] not in _SAFE and not is_same_origin(connection):
            return PlainTextResponse("a change must come from a page of this dashboard", 403)
        root = scope.get("root_path", "")
        path = scope["path"].removeprefix(root)
        resolved = self._resolve(connection)
        access = await resolved if inspect.isawaitable(resolved) else resolved
        scope.setdefault("state", {})["access"] = access
        if access is not None or path.startswith(_PUBLIC):
            return None
        if not isinstance(self._resolve, KeyAccess):
            return PlainTextResponse("access denied", 403)
        if "text/html" not in connection.headers.get("accept", "") or scope["method"] not in _SAFE:
            headers = {"www-authenticate": "Bearer"}
            return PlainTextResponse("log in, or send Authorization: Bearer KEY", 401, headers=headers)
        target = path + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
        return RedirectResponse(f"{root}/login{query(next=target)}", 303)


def _late_body(sentence: str) -> HTTPException:
    return HTTPException(408, sentence)


def is_same_origin(connection: HTTPConnection) -> bool:
    """Return whether a request comes from a page of this dashboard, or from no page at all.

    Browsers send Sec-Fetch-Site, except over plain HTTP from another host; then Origin is compared. A client that sends
    neither is not a browser: it sends a key itself, or the dashboard needs none.
    """
    site = connection.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = connection.headers.get("origin")
    if origin is None:
        return "cookie" not in connection.headers
    return urlsplit(origin).netloc == connection.headers.get("host")
