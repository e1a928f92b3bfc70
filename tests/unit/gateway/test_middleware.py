"""Middleware of the routes: the limit of running requests, the id and the status that are noted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from penstock.producer.gateway.auth import Authenticator
from penstock.producer.gateway.metrics import Metrics, render
from penstock.producer.gateway.middleware import GatewayMiddleware


async def call(
    edge: GatewayMiddleware, path: str, request_id: bytes | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Return the status, the headers and the body of the answer."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    headers = [] if request_id is None else [(b"x-request-id", request_id)]
    await edge({"type": "http", "method": "GET", "path": path, "headers": headers}, receive, send)
    head = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    return messages[0]["status"], head, messages[1]["body"]


async def test_excess_requests_get_retry_after() -> None:
    release, arrived = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["route"] = "/v1/models"
        arrived.set()
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    metrics = Metrics()
    authenticator = Authenticator(None, tenant="acme")
    edge = GatewayMiddleware(
        app, authenticator, metrics, public_paths=frozenset({"/health"}), max_running=1, request_timeout_s=60.0
    )

    first = asyncio.create_task(call(edge, "/v1/models"))
    await arrived.wait()
    status, head, body = await call(edge, "/v1/models")
    assert (status, head["retry-after"], json.loads(body)["error"]["code"]) == (429, "1", "gateway_busy")
    # Probes are let in all the same.
    probe = asyncio.create_task(call(edge, "/health"))
    release.set()
    assert [(await first)[0], (await probe)[0]] == [200, 200]
    assert len((await first)[1]["x-request-id"]) == 32
    text = render(metrics.families()).decode()
    assert 'penstock_http_requests_total{method="GET",route="none",status="429"} 1.0' in text
    assert 'penstock_http_requests_total{method="GET",route="/v1/models",status="200"} 2.0' in text
    assert "penstock_http_requests_in_flight 0.0" in text


async def test_an_id_that_cannot_be_echoed_is_refused() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    authenticator = Authenticator(None, tenant="acme")
    edge = GatewayMiddleware(
        app, authenticator, Metrics(), public_paths=frozenset(), max_running=1, request_timeout_s=60.0
    )

    for request_id in (b"a", b"x" * 200):
        status, head, _ = await call(edge, "/v1/models", request_id)
        assert (status, head["x-request-id"]) == (200, request_id.decode())
    for request_id in (b"x" * 201, b"no spaces", b"\xe9", b"x" * 60_000):
        status, head, body = await call(edge, "/v1/models", request_id)
        error = json.loads(body)["error"]
        assert (status, error["param"], error["code"]) == (400, "x-request-id", "invalid_request_id")
        assert len(error["message"]) < 1000
        assert len(head["x-request-id"]) == 32
    assert len((await call(edge, "/v1/models", b""))[1]["x-request-id"]) == 32


async def test_ignored_fields_are_named_and_counted() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["ignored"] = ("made_up", "client_metadata")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    metrics = Metrics()
    edge = GatewayMiddleware(
        app,
        Authenticator(None, tenant="acme"),
        metrics,
        public_paths=frozenset(),
        max_running=1,
        request_timeout_s=60.0,
    )
    _, head, _ = await call(edge, "/v1/responses")
    assert head["x-penstock-ignored"] == "client_metadata,made_up"
    text = render(metrics.families()).decode()
    assert 'penstock_http_fields_ignored_total{field="client_metadata"} 1.0' in text
    assert 'penstock_http_fields_ignored_total{field="other"} 1.0' in text
