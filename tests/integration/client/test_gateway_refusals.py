"""Refusals that may be temporary: all of them say when to try again, by what is known."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import httpx
import msgspec
import pytest

from penstock.producer import Client
from penstock.producer.openai.errors import _STATUS_OF, RETRYABLE, OpenAIError, error_of
from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import EngineHeartbeat, ModelCard, PoolingSetup
from penstock.shared.keys import Keys
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.supervision import EngineState
from penstock.shared.queue.policy import OverQuota, QueuePolicy, TenantPolicy
from penstock.shared.queue.stats import QueueStats

from .harness import claim_one, serve_gateway, write
from .test_gateway_bodies import BODIES, WITHOUT_MODEL, bodies

RUNNING = [
    (path, BODIES[schema] | {"model": "m"})
    for path, schema in bodies()
    if schema not in WITHOUT_MODEL | {"TokenizeBody", "DetokenizeBody"} and "count" not in path
]


@pytest.fixture(autouse=True)
async def _card(commands: CommandConnection, namespace: str, broker: Broker) -> None:
    """The model does everything."""
    tasks = ("generate", "embed", "classify")
    card = ModelCard(
        model="m", max_model_len=100, vocab_size=50, registered_at=2.0, supported_tasks=tasks, pooling=PoolingSetup()
    )
    await commands.execute("HSET", Keys(namespace).models(), "m", msgspec.json.encode(card))


async def refusals(http: httpx.AsyncClient, *excluded: str, **fields: Any) -> list[tuple[int, str, int]]:
    """Return status, code (or type) and Retry-After of a call of each endpoint that runs requests."""
    calls = [
        http.post(path, json=body | fields | stream)
        for path, body in RUNNING
        for stream in ({}, {"stream": True})
        if path not in excluded and (not stream or "messages" in body or "prompt" in body)
    ]
    assert len(calls) > 10
    outcomes = []
    for reply in await asyncio.gather(*calls):
        error = reply.json()["error"]
        outcomes.append((reply.status_code, error.get("code") or error["type"], int(reply.headers["retry-after"])))
    return outcomes


async def test_a_full_queue_and_a_quota(client: Client, broker: Broker, deployment: dict[str, str]) -> None:
    minute = TenantPolicy(requests_per_minute=1, over_quota=OverQuota.REFUSE)
    await client.configure_tenant("strict", minute)
    await client.submit("hi", tenant="strict")
    await claim_one(broker)
    async with serve_gateway(**deployment, tenant="strict") as http:
        quota = await refusals(http)
    await client.configure_queue(QueuePolicy(max_queue_depth=1))
    await client.submit("hi")
    async with serve_gateway(**deployment) as http:
        full = await refusals(http)
    assert {(status, code) for status, code, _ in quota} == {(429, "rate_limit_exceeded"), (429, "rate_limit_error")}
    assert all(1 < retry_after_s <= 62 for *_, retry_after_s in quota)  # the budget of a minute
    assert {(status, code) for status, code, _ in full} == {(429, "queue_full"), (429, "rate_limit_error")}


async def test_no_engine_until_one_restarts(
    commands: CommandConnection, namespace: str, deployment: dict[str, str]
) -> None:
    heartbeat = EngineHeartbeat(
        worker_id="w",
        engine_id="w-0",
        model="m",
        state=EngineState.DEAD,
        host="h",
        worker_pid=1,
        core_pid=2,
        restart_at=time.time() + 5000,
    )
    keys = Keys(namespace)
    await commands.execute("SADD", keys.engines(), "w-0")
    await commands.execute("SET", keys.engine("w-0"), msgspec.json.encode(heartbeat), "PX", 600_000)
    async with serve_gateway(**deployment, fail_fast=True) as http:
        for status, code, retry_after_s in await refusals(http):
            assert (status, code) in ((503, "engine_dead"), (503, "overloaded_error"))
            assert 1000 < retry_after_s <= 5000
        assert (await http.get("/ready")).headers["retry-after"] == "1"


async def test_an_expired_request_waits_for_the_queue(
    client: Client, broker: Broker, deployment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine holds one request, and held each for 0.2 s at least. So 300 of them take a minute at least."""
    for _ in range(2):
        await client.submit("hi")
        claim = await claim_one(broker)
        await asyncio.sleep(0.2)
        await write(broker, claim, 0, 72, 105, end=FinishReason.STOP)
    await client.submit("hi")
    await claim_one(broker)
    await client.submit_many(["hi"] * 300, band="batch")
    queue_stats, waits_s = Client.queue_stats, []

    async def recorded(client: Client, model: str | None = None, **options: Any) -> QueueStats:
        stats = await queue_stats(client, model, **options)
        waits_s.extend(band.estimated_wait_s for band in stats.bands if band.band == "batch")
        return stats

    monkeypatch.setattr(Client, "queue_stats", recorded)
    await client.queue_stats()
    assert waits_s[0] is not None
    assert waits_s[0] > 60
    async with serve_gateway(**deployment, status_wait_s=60) as http:
        # A response that expires is a 200, and "incomplete".
        expired = await refusals(http, "/v1/responses", timeout_s=0.05, band="batch")
    assert {(status, code) for status, code, _ in expired} == {(408, "request_expired"), (408, "timeout_error")}
    estimates = {1 if wait_s is None else max(1, math.ceil(wait_s)) for wait_s in waits_s}
    assert {retry_after_s for *_, retry_after_s in expired} <= estimates


def test_statuses_that_may_be_retried_have_a_time() -> None:
    """The error itself adds the time, whoever raises it."""
    for kind, status, _, _ in _STATUS_OF:
        error = kind.__new__(kind)
        BaseException.__init__(error, "x")
        assert error_of(error).status == status
        assert ("Retry-After" in error_of(error).headers) == (status in RETRYABLE)
    for status in RETRYABLE:
        assert OpenAIError(status, "x").headers == {"Retry-After": "1"}
        named = OpenAIError(status, "n is x", param="n", retry_after_s=7).renamed("m")
        assert (named.headers, named.message) == ({"Retry-After": "7"}, "m is x")
