"""Login with an operator's key, and logout."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from ...shared.deployment.audit import Actor, acting_as
from .access import SESSION_COOKIE, SESSION_S, KeyAccess
from .endpoints import read_form, root_of
from .render import Renderer
from .runtime import DashboardRuntime


class Login:
    """Routes of login and logout. The session is a signed cookie, unreadable to scripts and not sent by other sites."""

    def __init__(self, keys: KeyAccess, runtime: DashboardRuntime, renderer: Renderer) -> None:
        self._keys = keys
        self._runtime = runtime
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
        session = await self._keys.log_in(form.get("key", ""))
        target = form.get("next", "/")
        if session is None:
            return self._form(request, target, "this key is not valid", 401)
        access, cookie = session
        address = request.client.host if request.client else ""
        with acting_as(Actor(name=access.user, via="dashboard", address=address, source=self._keys.source)):
            async with self._runtime.source.audit.audited("dashboard.login", role=access.role):
                pass
        root = root_of(request)
        response = RedirectResponse(root + _own_path(target), 303)
        # A proxy that terminates TLS sets the header. A client that forges it only loses its own session.
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

    def _form(self, request: Request, target: str, error: str = "", status: int = 200) -> Response:
        root = root_of(request)
        html = self._renderer.plain("login", root, title="Log in", target=_own_path(target), error=error)
        return HTMLResponse(html, status)


def _own_path(target: str) -> str:
    """Return ``target`` if it is a path of this dashboard, else that of the first page."""
    parts = urlsplit(target)
    is_own = not parts.scheme and not parts.netloc and target.startswith("/") and not target.startswith(("//", "/\\"))
    return target if is_own and target.isprintable() else "/"
