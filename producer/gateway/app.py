"""Build the gateway's ASGI application: its collaborators, routes and middleware."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from ...shared.connection import CommandConnection
from ...shared.deployment.presence import Presence, ProcessKind
from ...shared.keys import Keys
from ...shared.process.boundary import ends_task
from ...shared.shards import make_commands
from ...shared.tracing.tracing import Tracing, open_tracing
from ...shared.values.distribution import VERSION
from .. import Client
from ..batches import BatchStore
from ..control.rate_limits import RateLimits
from ..io_processors import IOProcessors
from ..openai.parsers import ModelParsers
from ..openai.responses.service import Responses
from .auth import ApiKeys, Authenticator
from .cors import cors
from .http import Gateway, any_exception, http_exception
from .images import ImageFetcher
from .metrics import Family, Metrics
from .middleware import GatewayMiddleware
from .operations import Operation, build_openapi
from .reservations import IdempotencyKeys
from .routes import adapters, batches, files, generate, message_batches, messages, models, pooling, state, tokens, usage
from .routes import responses as responses_routes
from .settings import GatewaySettings

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

OPERATIONS: tuple[Operation, ...] = (
    *generate.OPERATIONS,
    *messages.OPERATIONS,
    *message_batches.OPERATIONS,
    *pooling.OPERATIONS,
    *responses_routes.OPERATIONS,
    *models.OPERATIONS,
    *adapters.OPERATIONS,
    *tokens.OPERATIONS,
    *files.OPERATIONS,
    *batches.OPERATIONS,
    *usage.OPERATIONS,
    *state.OPERATIONS,
)


def build_app(
    settings: GatewaySettings,
    metrics: Metrics | None = None,
    *,
    sum_metrics: Callable[[], Awaitable[list[Family]]] | None = None,
    process: int | None = None,
) -> Starlette:
    """Return the gateway as an ASGI application, which connects to Redis at the start of its lifespan.

    Args:
        metrics: counters of this process; new ones if None.
        sum_metrics: reads the metrics of all processes of the gateway, if it has several.
        process: the number of this process among them.

    Raises:
        ConfigurationError: an I/O processor cannot be loaded.

    The lifespan raises:
        ConfigurationError: the URL is malformed, Redis is unreachable or too old, or the folder cannot be used.
    """
    parts = _Parts(settings, metrics or Metrics(), sum_metrics, process)
    public_paths = frozenset(operation.path for operation in OPERATIONS if operation.is_public)
    edge = _edge(settings, parts.authenticator, parts.metrics, public_paths)
    app = Starlette(
        routes=_routes(OPERATIONS),
        middleware=[*cors(settings.cors_origins), *http_spans(parts.tracing.provider, public_paths), edge],
        exception_handlers={HTTPException: http_exception, Exception: any_exception},
        lifespan=parts.serve,
    )
    app.state.openapi = msgspec.json.encode(build_openapi(OPERATIONS, VERSION))
    return app


class _Parts:
    """The collaborators of the application; see ``build_app``."""

    def __init__(
        self,
        settings: GatewaySettings,
        metrics: Metrics,
        sum_metrics: Callable[[], Awaitable[list[Family]]] | None,
        process: int | None,
    ) -> None:
        keys = Keys(settings.namespace)
        self.metrics = metrics
        self.tracing = open_tracing(settings.otlp_traces_endpoint, "penstock-gateway")
        self._settings = settings
        self._connection = make_commands(settings.redis_url, settings.shards, keys)
        self.authenticator = Authenticator(
            ApiKeys(self._connection, keys) if settings.api_keys else None, tenant=settings.tenant
        )
        self._io_processors = IOProcessors(settings.io_processors)
        self._presence = _presence(settings, self._connection, process)
        self._read_metrics = sum_metrics or self._own_metrics

    async def _own_metrics(self) -> list[Family]:
        return self.metrics.families()

    @asynccontextmanager
    async def serve(self, app: Starlette) -> AsyncGenerator[None]:
        """Run the lifespan: connect to Redis, serve, and close everything."""
        settings = self._settings
        store = BatchStore(settings.redis_url, settings.files_dir, namespace=settings.namespace)
        async with _client(settings, self.tracing, self._io_processors) as client, store:
            await store.files.contents.prepare()
            parsers = ModelParsers(client, settings.parsers, default_model=settings.model)
            images = ImageFetcher(is_allowed=settings.fetch_images, networks=settings.image_networks)
            app.state.gateway = Gateway(
                settings,
                client,
                self.authenticator,
                self.metrics,
                self._read_metrics,
                parsers,
                _responses(settings, client, self._connection, parsers),
                store,
                self._connection,
                images,
                self._io_processors,
                IdempotencyKeys(self._connection, Keys(settings.namespace), result_ttl_s=settings.result_ttl_s),
                RateLimits(client, self._connection, Keys(settings.namespace)),
            )
            self._presence.start()
            try:
                yield
            finally:
                await self._presence.leave()
                await images.close()
        await self._connection.close()
        await self.tracing.close()


def _client(settings: GatewaySettings, tracing: Tracing, io_processors: IOProcessors) -> Client:
    return Client.connect(
        settings.redis_url,
        namespace=settings.namespace,
        shards=settings.shards,
        model=settings.model,
        lease_ttl_s=settings.lease_ttl_s,
        result_ttl_s=settings.result_ttl_s,
        io_processors=io_processors,
        tracer_provider=tracing.provider,
    )


def _edge(
    settings: GatewaySettings, authenticator: Authenticator, metrics: Metrics, public_paths: frozenset[str]
) -> Middleware:
    return Middleware(
        GatewayMiddleware,
        authenticator,
        metrics,
        public_paths=public_paths,
        max_running=settings.max_running_requests,
        request_timeout_s=settings.request_timeout_s,
    )


def http_spans(provider: TracerProvider | None, untraced_paths: Iterable[str]) -> list[Middleware]:
    """Return the middleware that records spans of requests; empty without a provider."""
    if provider is None:
        return []
    # Imported here, so that OpenTelemetry is loaded only if tracing is on.
    from ...shared.tracing.spans import tracer_of
    from .http_spans import HttpSpans

    return [Middleware(HttpSpans, tracer_of(provider), untraced_paths)]


def _presence(settings: GatewaySettings, connection: CommandConnection, process: int | None) -> Presence:
    facts = {"api_keys": "on" if settings.api_keys else "off"}
    if process is not None:
        facts["process"] = str(process)
    return Presence(connection, Keys(settings.namespace), ProcessKind.GATEWAY, facts)


def _responses(
    settings: GatewaySettings, client: Client, connection: CommandConnection, parsers: ModelParsers
) -> Responses:
    return Responses(
        client,
        connection,
        Keys(settings.namespace),
        parsers,
        result_ttl_s=settings.result_ttl_s,
        linger_s=settings.reconnect_grace_s,
        fail_fast=settings.fail_fast,
        status_wait_s=settings.status_wait_s,
    )


def _routes(operations: Sequence[Operation]) -> list[Route]:
    """Return one route per path, so that the reply to a wrong method can list all methods of the path."""
    by_path: dict[str, dict[str, Operation]] = {}
    for operation in operations:
        by_path.setdefault(operation.path, {})[operation.method] = operation
    return [Route(path, _endpoint(path, by_method), methods=list(by_method)) for path, by_method in by_path.items()]


def _endpoint(path: str, by_method: Mapping[str, Operation]) -> Callable[[Request], Awaitable[ASGIApp]]:
    """Return the handler of a path. It turns exceptions into responses before Starlette would log and raise them."""

    async def endpoint(request: Request) -> ASGIApp:
        request.state.route = path
        method = "GET" if request.method == "HEAD" else request.method
        try:
            return await by_method[method].handler(request)
        except BaseException as error:  # a request must not end the process
            if ends_task(error):
                raise
            return await any_exception(request, error)

    return endpoint
