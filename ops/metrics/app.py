"""The process of ``penstock metrics``, and its HTTP endpoints: /metrics, the signal for autoscalers as JSON, probes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...producer.web.server import announce, listening, serve_app, web_config
from ...shared.keys import Keys
from ...shared.metrics.exposition import MetricNames, expose
from ...shared.shards import ShardsArgument, parse_shards
from .snapshot import Snapshot, Wanted
from .wanted import WantedOptions

SHUTDOWN_S = 2


class WantedReply(msgspec.Struct, frozen=True):
    """Signal of one model for autoscalers. ``replicas`` is the wanted number of engines, rounded up."""

    model: str
    replicas: int
    wanted_engines: float
    num_engines: int


def build_app(snapshot: Snapshot, names: MetricNames) -> Starlette:
    """Return the application, which reads the deployment during its lifespan."""

    async def metrics(_: Request) -> Response:
        return Response(expose(snapshot.samples(), names), media_type=CONTENT_TYPE_LATEST)

    async def list_wanted(_: Request) -> Response:
        return _json_response([_reply(model, signal) for model, signal in sorted(snapshot.wanted.items())])

    async def wanted_of(request: Request) -> Response:
        model = request.path_params["model"]
        if model not in snapshot.wanted:
            return _json_response(
                {"error": f"no worker has served model {model!r} yet, or it could not be read so far"}, 404
            )
        return _json_response(_reply(model, snapshot.wanted[model]))

    async def healthz(_: Request) -> Response:
        return _json_response({"status": "ok"})

    async def readyz(_: Request) -> Response:
        if snapshot.is_good:
            return _json_response({"status": "ok"})
        return _json_response({"error": "Redis, or the one that holds a model, does not answer"}, 503)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        reading = asyncio.create_task(snapshot.run())
        try:
            yield
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading

    return Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/wanted", list_wanted),
            Route("/wanted/{model:path}", wanted_of),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
        ],
        lifespan=lifespan,
    )


def _reply(model: str, wanted: Wanted) -> WantedReply:
    return WantedReply(model, math.ceil(wanted.wanted_engines), round(wanted.wanted_engines, 3), wanted.num_engines)


def _json_response(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def serve(
    redis_url: str,
    *,
    host: str,
    port: int,
    namespace: str,
    shards: ShardsArgument,
    names: MetricNames,
    options: WantedOptions,
    refresh_s: float,
) -> int:
    """Serve until SIGTERM or SIGINT, and return 0. Serving starts and continues while Redis is unreachable.

    Raises:
        ConfigurationError: the address cannot be listened on, or a URL cannot be read.
    """
    details = {"address": f"{host}:{port}"}
    snapshot = Snapshot(redis_url, parse_shards(shards), Keys(namespace), options, refresh_s=refresh_s, details=details)
    app = build_app(snapshot, names)
    config = web_config(app, shutdown_timeout_s=SHUTDOWN_S)
    with listening(host, port) as listener, asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(serve_app(app, config, listener, partial(announce, listener, "/metrics")))
    return 0
