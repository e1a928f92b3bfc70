"""The login with an operator's key, and the logout."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from ...shared.deployment.audit import Actor, acting_as
from .access import SESSION_COOKIE, SESSION_S, KeyAccess
from .endpoints import read_form, root_of
from .hub import Hub
from .render import Renderer


class Login:
    """Its addresses. A session is a signed cookie that no script can read and no other site can send a change by."""

    def __init__(self, keys: KeyAccess, hub: Hub, renderer: Renderer) -> None:
        self._keys = keys
        self._hub = hub
        self._renderer = renderer

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/login", self._show),
            Route("/login", self._log_in, methods=["POST"]),
            Route("/logout", self._log_out, methods=["POST"]),
        ]

    async def _show(self, request: Request) -> Response:
        return self._form(request, request.query_params.get("next", "/"))

    async def _log_in(self, request: Request) -> Response:
        form = await read_form(request) or {}
        found = await self._keys.log_in(form.get("key", ""))
        wanted = form.get("next", "/")
        if found is None:
            return self._form(request, wanted, "this key is not valid", 401)
        access, cookie = found
        address = request.client.host if request.client else ""
        with acting_as(Actor(name=access.user, via="dashboard", address=address, source=self._keys.source)):
            async with self._hub.source.audit.audited("dashboard.login", role=access.role):
                pass
        root = root_of(request)
        response = RedirectResponse(root + _own_path(wanted), 303)
        # A proxy that ends TLS says so. Who says it without one locks out himself alone.
        is_https = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
        response.set_cookie(
            SESSION_COOKIE,
            cookie,
            max_age=SESSION_S,
            path=root or "/",
            httponly=True,
            secure=is_https,
            samesite="lax",
        )
        return response

    async def _log_out(self, request: Request) -> Response:
        root = root_of(request)
        response = RedirectResponse(f"{root}/login", 303)
        response.delete_cookie(SESSION_COOKIE, path=root or "/")
        return response

    def _form(self, request: Request, wanted: str, error: str = "", status: int = 200) -> Response:
        root = root_of(request)
        html = self._renderer.plain("login", root, title="Log in", wanted=_own_path(wanted), error=error)
        return HTMLResponse(html, status)


def _own_path(wanted: str) -> str:
    """A path of this dashboard; its first page if it is anything else."""
    parts = urlsplit(wanted)
    is_own = not parts.scheme and not parts.netloc and wanted.startswith("/") and not wanted.startswith(("//", "/\\"))
    return wanted if is_own and wanted.isprintable() else "/"
