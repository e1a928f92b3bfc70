"""Which web pages may call the gateway from a browser.

    https://app.example.com      that origin
    https://*.example.com        every host below example.com, however deep, and not example.com itself
    https://app-*.example.com    an asterisk inside of a label is a part of that label
    http://localhost:*           every port
    *                            every page

Cookies and other credentials of the browser are never let in, so an origin is allowed to say what anybody could who
has an API key, and "*" is no more than that. A page sends its key by itself, in ``Authorization``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....shared.errors import ConfigurationError
from ....shared.shown import shown

ANY = "*"
_LABEL = r"[a-z0-9_*-]+"
_FORM = re.compile(rf"(https?)://({_LABEL}(?:\.{_LABEL})*|\[[0-9a-f:.]+\])(?::(\d{{1,5}}|\*))?")
_ANY_LABELS, _ANY_OF_LABEL, _ANY_PORT = r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*", "[a-z0-9_-]*", r"(?::\d{1,5})?"


def origin_pattern(origin: str) -> str:
    """Return the regular expression of the origins that ``origin`` stands for; not of ``ANY``.

    Raises:
        ConfigurationError: it is no origin, or one with an asterisk as its whole host.
    """
    match = _FORM.fullmatch(origin)
    if match is None or match[2] == ANY:
        raise ConfigurationError(
            "cors_origins must be origins such as https://app.example.org, in lower case and without a path, patterns "
            f"such as https://*.example.org, or '*' for every page, got {shown(origin)}"
        )
    scheme, host, port = match.groups()
    first, dot, rest = host.partition(".")
    labels = _ANY_LABELS if first == ANY else _with_gaps(first)
    end = "" if port is None else _ANY_PORT if port == ANY else f":{port}"
    return f"{scheme}://{labels}{re.escape(dot)}{_with_gaps(rest)}{end}"


def cors(origins: Sequence[str]) -> list[Middleware]:
    """Return what lets pages of ``origins`` in; nothing for none.

    Raises:
        ConfigurationError: as ``origin_pattern``.
    """
    if not origins:
        return []
    return [
        Middleware(_VaryingByOrigin),
        Middleware(
            CORSMiddleware,
            allow_origins=[ANY] if ANY in origins else [],
            allow_origin_regex="|".join(origin_pattern(origin) for origin in origins if origin != ANY) or None,
            allow_methods=["GET", "POST", "DELETE"],
            # SDKs send headers of their own, x-stainless-… among them, and a name says nothing that could harm.
            allow_headers=[ANY],
            expose_headers=["x-request-id", "retry-after"],
        ),
    ]


class _VaryingByOrigin:
    """Tells caches that an answer depends on who asks, also one that lets nobody in, as older starlettes do not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""

        async def send_varying(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                if "origin" not in ", ".join(headers.getlist("vary")).lower():
                    headers.add_vary_header("Origin")
            await send(message)

        await self._app(scope, receive, send_varying if scope["type"] == "http" else send)


def _with_gaps(text: str) -> str:
    return _ANY_OF_LABEL.join(map(re.escape, text.split(ANY)))
