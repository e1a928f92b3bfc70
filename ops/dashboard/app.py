"""The composition root of the dashboard: parts, routes, middleware, styles and scripts."""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...producer.control.usage import Prices
from ...shared.keys import Keys
from ...shared.shards import ShardsArgument, make_commands
from ...shared.values.names import DEFAULT_NAMESPACE
from ..views.pages import ACTIONS, PAGES
from ..views.source import RETRY_FOR_S
from .access import KeyAccess, Resolve
from .edge import Edge
from .endpoints import Endpoints
from .login import Login
from .render import Renderer
from .runtime import DashboardRuntime

_FOLDER = Path(__file__).parent / "static"
_FILES = {
    path.relative_to(_FOLDER).as_posix(): path.read_bytes()
    for path in _FOLDER.rglob("*")
    if path.suffix in (".css", ".js", ".svg")
}
MAX_AGE_S = 300


def dashboard(
    redis_url: str,
    *,
    access: Resolve | None = None,
    namespace: str = DEFAULT_NAMESPACE,
    shards: ShardsArgument = None,
    hosts: Sequence[str] = (),
    prices: Prices | None = None,
) -> Starlette:
    """Return the pages as an ASGI application to serve, or to mount under any path.

    Mounted applications get no lifespan events. So connections are opened at the first request. To close them, enter
    ``pages.router.lifespan_context(pages)`` in the lifespan of the outer app.

    Args:
        redis_url: as of ``Client``.
        access: returns the access of a request; None for operators' keys (`penstock operator`) and a login.
        namespace, shards: as of ``Client``.
        hosts: allowed host names; empty for any.
        prices: for the costs of usage (``read_prices``); None for none.

    Raises:
        ConfigurationError: the URL cannot be read.
    """
    keys = Keys(namespace)
    connection = make_commands(redis_url, shards, keys, retry_for_s=RETRY_FOR_S)
    resolve = KeyAccess(connection, keys) if access is None else access
    has_login = isinstance(resolve, KeyAccess)
    renderer = Renderer(PAGES, has_login=has_login)
    options = {"operator_keys": "on" if has_login else "off"}
    runtime = DashboardRuntime(redis_url, shards, connection, keys, renderer, options, prices)
    endpoints = Endpoints(runtime, renderer)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        await runtime.open()
        try:
            yield
        finally:
            await runtime.close()

    routes = static_routes()
    if isinstance(resolve, KeyAccess):
        routes += Login(resolve, runtime, renderer).routes
    for page in PAGES:
        routes += endpoints.of_page(page)
    routes.append(Route("/columns", endpoints.choose_columns, methods=["POST"]))
    routes.append(Route("/filters", endpoints.save_filter, methods=["POST"]))
    routes += [Route(action.path, endpoints.of_action(action), methods=["POST"]) for action in ACTIONS]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Edge, resolve=resolve, hosts=hosts)],
        exception_handlers={404: endpoints.not_found, Exception: endpoints.failed},
        lifespan=lifespan,
    )
    app.state.runtime = runtime
    return app


def static_routes() -> list[Route]:
    """Return a route for each file."""
    return [Route(f"/static/{name}", _sender(name, data)) for name, data in _FILES.items()]


def _sender(name: str, data: bytes) -> Callable[[Request], Awaitable[Response]]:
    kind = mimetypes.types_map[Path(name).suffix]
    headers = {"etag": f'"{hashlib.sha256(data).hexdigest()[:16]}"', "cache-control": f"private, max-age={MAX_AGE_S}"}

    async def send_file(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=kind, headers=headers)

    return send_file
