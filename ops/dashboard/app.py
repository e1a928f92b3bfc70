"""The composition root of the dashboard: its parts, its routes, and what is around them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from ...shared.keys import Keys
from ...shared.shards import ShardsArgument, make_commands
from ...shared.values.names import DEFAULT_NAMESPACE
from ..views.pages import ACTIONS, PAGES
from ..views.source import RETRY_FOR_S
from .access import KeyAccess, Resolve
from .edge import Edge
from .endpoints import Endpoints
from .hub import Hub
from .login import Login
from .render import Renderer
from .static_files import static_routes


def dashboard(
    redis_url: str,
    *,
    access: Resolve | None = None,
    namespace: str = DEFAULT_NAMESPACE,
    shards: ShardsArgument = None,
    hosts: Sequence[str] = (),
) -> Starlette:
    """Return the pages as an ASGI application, to be served or mounted under any path.

    Mounted applications are not told of the start and the end of a server. So connections are made at the first
    request; an app that wants them closed enters ``pages.router.lifespan_context(pages)`` in its own lifespan.

    Args:
        redis_url: as of ``Client``.
        access: says who asks and what they may do; operators' keys (`penstock operator`) and a login when None.
        namespace, shards: as of ``Client``.
        hosts: names by which the pages may be called; any if there are none.

    Raises:
        ConfigurationError: the URL cannot be read.
    """
    keys = Keys(namespace)
    connection = make_commands(redis_url, shards, keys, retry_for_s=RETRY_FOR_S)
    resolve = KeyAccess(connection, keys) if access is None else access
    has_login = isinstance(resolve, KeyAccess)
    renderer = Renderer(PAGES, has_login=has_login)
    hub = Hub(redis_url, shards, connection, keys, renderer, {"operator_keys": "on" if has_login else "off"})
    endpoints = Endpoints(hub, renderer)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        await hub.open()
        try:
            yield
        finally:
            await hub.close()

    routes = static_routes()
    if isinstance(resolve, KeyAccess):
        routes += Login(resolve, hub, renderer).routes
    for page in PAGES:
        routes += endpoints.of_page(page)
    routes += [Route(action.path, endpoints.of_action(action), methods=["POST"]) for action in ACTIONS]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Edge, resolve=resolve, hosts=hosts)],
        exception_handlers={404: endpoints.not_found, Exception: endpoints.failed},
        lifespan=lifespan,
    )
    app.state.hub = hub
    return app
