"""/, /health, /ready, /metrics, /version and /openapi.json: endpoints for operators of the gateway."""

from __future__ import annotations

import asyncio

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import Response

from ....shared.deployment.presence import read_processes
from ....shared.errors import EngineDeadError, PenstockError
from ....shared.keys import Keys
from ....shared.metrics.exposition import expose
from ....shared.values.distribution import VERSION
from ...control.deployment import count_due, jobs_findings, read_device_samples, read_models
from ...openai.errors import OpenAIError
from ..http import gateway_of, json_response
from ..metrics import render
from ..operations import Operation

# After this time a probe reports that Redis does not answer.
PROBE_TIMEOUT_S = 5.0


class Health(msgspec.Struct):
    """State of the gateway; ``status`` is "ok"."""

    status: str


class Readiness(Health, omit_defaults=True):
    """State of the gateway. ``warnings`` lists problems that do not stop this gateway, but need an operator."""

    warnings: list[str] = []


class Version(msgspec.Struct):
    """Version of the installed distribution."""

    version: str


async def health(request: Request) -> Response:
    """Answer GET /health: 200 while this process can reach Redis, independent of engines."""
    await _models(request)
    return json_response(Health("ok"))


async def ready(request: Request) -> Response:
    """Answer GET /ready: 200 if a live engine serves at least one model; else 503 with the reason.

    Missing background processes are only a warning, because removing the gateway from a load balancer would not help.
    """
    client = gateway_of(request).client
    causes = ["no worker has served a model yet"]
    for model in await _models(request):
        try:
            await client.check_health(model)
        except EngineDeadError as error:
            causes.append(str(error))
        else:
            return json_response(Readiness("ok", await _warnings(request)))
    raise OpenAIError(503, causes[-1], type="server_error", code="not_ready")


async def metrics(request: Request) -> Response:
    """Answer GET /metrics: the metrics of this gateway, and those of all queues and engines if ``deployment_metrics``
    is set."""
    gateway = gateway_of(request)
    text = render(await gateway.read_metrics())
    if gateway.settings.deployment_metrics:
        keys = Keys(gateway.settings.namespace)
        models, devices = await asyncio.gather(
            read_models(gateway.connection, keys), read_device_samples(gateway.connection, keys)
        )
        text += expose([*(sample for model in models or [] for sample in model.samples()), *devices])
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def version(_: Request) -> Response:
    """Answer GET /version, and / to programs that check whether there is a server."""
    return json_response(Version(VERSION))


async def openapi(request: Request) -> Response:
    """Answer GET /openapi.json."""
    return Response(request.app.state.openapi, media_type="application/json")


async def _warnings(request: Request) -> list[str]:
    gateway = gateway_of(request)
    keys = Keys(gateway.settings.namespace)
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            processes = await read_processes(gateway.connection.execute, keys)
            findings = jobs_findings(processes, await count_due(gateway.connection, keys))
    except (TimeoutError, PenstockError, RedisError) as error:
        return [f"due jobs cannot be counted: {error or 'Redis does not answer'}"]
    return [f"{finding.message}; {finding.remedy}" for finding in findings]


async def _models(request: Request) -> list[str]:
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return list(await gateway_of(request).client.models())
    except TimeoutError:
        raise OpenAIError(503, "Redis does not answer", type="server_error", code="queue_unavailable") from None


OPERATIONS = (
    Operation(
        method="GET",
        path="/health",
        handler=health,
        summary="Whether the gateway is healthy",
        response=Health,
        is_public=True,
    ),
    Operation(
        method="GET",
        path="/ready",
        handler=ready,
        summary="Whether a model is served",
        response=Readiness,
        is_public=True,
    ),
    Operation(
        method="GET",
        path="/metrics",
        handler=metrics,
        summary="Metrics for Prometheus",
        media_type="text/plain",
        is_public=True,
    ),
    Operation(
        method="GET",
        path="/version",
        handler=version,
        summary="The version",
        response=Version,
        is_public=True,
    ),
    Operation(method="GET", path="/openapi.json", handler=openapi, summary="This document", is_public=True),
    Operation(method="GET", path="/", handler=version, summary="The version", response=Version, is_public=True),
)
