"""Decide which web pages may call the gateway from a browser.

    https://app.example.com      that origin
    https://*.example.com        every host below example.com at any depth, but not example.com itself
    https://app-*.example.com    an asterisk inside a label stands for a part of that label
    http://localhost:*           every port
    *                            every page

Cookies and other browser credentials are never accepted. A page sends its API key itself, in ``Authorization``. So an
allowed origin can do no more than anybody with an API key, even with "*".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...shared.errors import ConfigurationError
from ...shared.values.shown import shown

ANY = "*"
_LABEL = r"[a-z0-9_*-]+"
_FORM = re.compile(rf"(https?)://({_LABEL}(?:\.{_LABEL})*|\[[0-9a-f:.]+\])(?::(\d{{1,5}}|\*))?")
_ANY_LABELS, _ANY_OF_LABEL, _ANY_PORT = r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*", "[a-z0-9_-]*", r"(?::\d{1,5})?"


def origin_pattern(origin: str) -> str:
    """Return the regular expression that matches the origins of the pattern ``origin``, which must not be ``ANY``.

    Raises:
        ConfigurationError: it is not an origin, or its whole host is an asterisk.
    """
    match = _FORM.fullmatch(origin)
    if match is None or match[2] == ANY:
        raise ConfigurationError(
            "cors_origins must be origins such as https://app.example.org, in lower case and without a path, patterns "
            f"such as https://*.example.org, or '*' for every page, got {shown(origin)}"
        )
    scheme, host, port = match.groups()
    first, dot, rest = host.partition(".")
    labels = _ANY_LABELS if first == ANY else _label_pattern(first)
    end = "" if port is None else _ANY_PORT if port == ANY else f":{port}"
    return f"{scheme}://{labels}{re.escape(dot)}{_label_pattern(rest)}{end}"


def cors(origins: Sequence[str]) -> list[Middleware]:
    """Return the middleware that admits pages of ``origins``; empty if there are none.

    Raises:
        ConfigurationError: an origin is invalid; see ``origin_pattern``.
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
            # Any header: SDKs send their own, such as x-stainless-…, and a header's name does no harm.
            allow_headers=[ANY],
            expose_headers=[ANY],  # all, since credentials are not allowed
        ),
    ]


class _VaryingByOrigin:
    """Middleware that adds ``Vary: Origin`` to every response, which older versions of Starlette omit on refusals."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""

        async def send_varying(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                if "origin" not in ", ".join(headers.getlist("vary")).lower():
                    headers.add_vary_header("Origin")
            await send(message)

        await self._app(scope, receive, send_varying if scope["type"] == "http" else send)


def _label_pattern(text: str) -> str:
    return _ANY_OF_LABEL.join(map(re.escape, text.split(ANY)))
