"""What is put in line and what is refused: bounds of the queue, one answer for each request, each id once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.shared.broker import NEW, UNSERVED, Broker, Entry, Queue
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import PenstockError, QueueFullError, QuotaExceededError, ValidationError
from penstock.shared.queue.policy import OverQuota, QueuePolicy, TenantPolicy

from ..conftest import TTL_MS, enqueue, finish_with, served_per_s, take
from ..snapshot import read_snapshot

Refused = Callable[..., Awaitable[QueueFullError]]


@pytest.fixture
def refused(broker: Broker, commands: CommandConnection) -> Refused:
    """Enqueues what must be refused; nothing of it may be left."""

    async def refused(request_id: str, message: str, **options: Any) -> QueueFullError:
        before = await read_snapshot(commands, broker.keys)
        with pytest.raises(QueueFullError, match=message) as caught:
            await enqueue(broker, request_id, **options)
        after = await read_snapshot(commands, broker.keys)
        assert after.kinds == before.kinds
        assert all(after.of(kind) == before.of(kind) for kind in after.kinds)
        assert caught.value.retryable
        return caught.value

    return refused


async def serve_for(commands: CommandConnection, broker: Broker, duration_ms: int) -> None:
    """Move the start of what is under way back by this time."""
    await commands.execute("HINCRBY", broker.keys.prefix + "queue", "rate_at", -duration_ms)


@pytest.mark.parametrize("scope", ["model", "tenant"])
async def test_waiting_requests_are_limited_by_the_bound(
    broker: Broker, queue: Queue, refused: Refused, scope: str
) -> None:
    if scope == "model":
        await queue.configure(QueuePolicy(max_queue_depth=3))
    else:
        await queue.configure_tenant("t", TenantPolicy(max_queue_depth=3))
    # The bound is of all bands together; another tenant's requests count for the model alone.
    for request_id, band in (("a", "interactive"), ("b", "standard"), ("c", "batch")):
        await enqueue(broker, request_id, tenant="t", band=band)
    whose = "the model" if scope == "model" else "tenant 't'"
    await refused("d", f"the queue of {whose} is full: max_queue_depth is 3 requests", tenant="t")
    if scope == "model":
        await refused("d", "max_queue_depth", tenant="u")
    else:
        await enqueue(broker, "u", tenant="u")
    # What was claimed does not wait any more.
    await take(broker, "e0", 1)
    await enqueue(broker, "d", tenant="t")
    await refused("e", "max_queue_depth", tenant="t")
    await broker.cancel("d")
    await enqueue(broker, "e", tenant="t")


@pytest.mark.parametrize("scope", ["model", "tenant"])
async def test_waiting_tokens_are_limited_by_the_bound(
    broker: Broker, queue: Queue, refused: Refused, scope: str
) -> None:
    if scope == "model":
        await queue.configure(QueuePolicy(max_queue_tokens=100))
    else:
        await queue.configure_tenant("default", TenantPolicy(max_queue_tokens=100))
    await enqueue(broker, "a", num_prompt_tokens=30, max_tokens=30)
    await enqueue(broker, "b", num_prompt_tokens=20, max_tokens=20)
    await refused("c", "max_queue_tokens is 100 tokens", max_tokens=1)
    for claim in await take(broker, "e0", 2):
        await finish_with(broker, claim, num_output=1)
    # A request that is larger than the bound waits alone, rather than never.
    await enqueue(broker, "large", num_prompt_tokens=500, max_tokens=1)
    await refused("c", "max_queue_tokens", max_tokens=1)


async def test_retry_after_is_short_before_anything_was_served(broker: Broker, queue: Queue, refused: Refused) -> None:
    await queue.configure(QueuePolicy(max_queue_depth=1))
    await enqueue(broker, "a")
    assert (await refused("b", r"try again in 1\.0 s")).retry_after_s == 1


@pytest.mark.parametrize("unit", ["requests", "tokens"])
async def test_retry_after_is_estimated_from_the_measured_rate(
    broker: Broker, queue: Queue, commands, refused: Refused, unit: str
) -> None:
    """Covers the time to serve the excess and a twentieth of the bound."""
    for number in range(20):
        await enqueue(broker, f"r{number}", num_prompt_tokens=60, max_tokens=40)
    wave = await take(broker, "e0", 20)
    await serve_for(commands, broker, 100_000)
    for claim in wave:
        await finish_with(broker, claim, num_output=5)
    rate = await served_per_s(commands, broker, unit)
    assert rate == pytest.approx({"requests": 0.2, "tokens": 20}[unit], rel=0.1)
    if unit == "requests":
        await queue.configure(QueuePolicy(max_queue_depth=100))
        await fill(broker, 100, max_tokens=1)
        too_much = 1 + 5
    else:
        await queue.configure(QueuePolicy(max_queue_tokens=20_000))
        await fill(broker, 100, max_tokens=200)
        too_much = 200 + 1000
    error = await refused("more", "full", max_tokens=200)
    assert error.retry_after_s == pytest.approx(too_much / rate, abs=0.002)


async def test_retry_after_grows_with_the_age_of_running_requests(
    broker: Broker, queue: Queue, commands, refused: Refused
) -> None:
    await queue.configure(QueuePolicy(max_queue_depth=1))
    for request_id in ("a", "b"):
        await enqueue(broker, request_id)
        (claim,) = await take(broker, "e0", 1)
        if request_id == "a":
            await serve_for(commands, broker, 60_000)
            await finish_with(broker, claim, num_output=1)
    await enqueue(broker, "c")
    soon = (await refused("d", "full")).retry_after_s
    assert soon == pytest.approx(60 * 1.05, rel=0.1)
    await serve_for(commands, broker, 60_000)
    assert (await refused("e", "full")).retry_after_s == pytest.approx(soon + 60 * 1.05, rel=0.1)


async def fill(broker: Broker, num_requests: int, *, max_tokens: int) -> None:
    entries = [
        Entry(request_id=f"w{i}", payload=b"p", result_ttl_ms=TTL_MS, max_tokens=max_tokens)
        for i in range(num_requests)
    ]
    assert await broker.enqueue_many(entries) == [NEW] * num_requests


async def test_the_service_rate_counts_only_time_with_running_requests(broker: Broker, queue: Queue, commands) -> None:
    await enqueue(broker, *"abcd", num_prompt_tokens=10, max_tokens=10)

    async def serve_one() -> None:
        (claim,) = await take(broker, "e0", 1)
        await serve_for(commands, broker, 50_000)
        await finish_with(broker, claim, num_output=4)

    await serve_one()
    assert (await queue.stats()).mean_output_tokens == 4
    await serve_one()
    assert await served_per_s(commands, broker) == pytest.approx(1 / 50, rel=0.1)
    # An hour in which nothing is under way is not slow service,
    await serve_for(commands, broker, 3_600_000)
    await serve_one()
    assert await served_per_s(commands, broker) == pytest.approx(1 / 50, rel=0.1)
    # but a request that takes long is, and what was before it is forgotten.
    (claim,) = await take(broker, "e0", 1)
    await serve_for(commands, broker, 300_000)
    await finish_with(broker, claim, num_output=4)
    assert await served_per_s(commands, broker) == pytest.approx(1 / 300, rel=0.1)


async def test_a_known_id_is_attached_to_even_when_nothing_more_is_accepted(broker: Broker, queue: Queue) -> None:
    await queue.configure(QueuePolicy(max_queue_depth=1))
    assert await broker.enqueue("a", b"p", result_ttl_ms=TTL_MS, call="x") == NEW
    assert await broker.enqueue("a", b"p", result_ttl_ms=TTL_MS, call="x") == NEW
    assert await broker.enqueue("a", b"p", result_ttl_ms=TTL_MS, call="y") == "queued"
    assert await broker.enqueue("a", b"p", result_ttl_ms=TTL_MS, band="no-such-band") == "queued"
    assert await broker.enqueue("a", b"p", result_ttl_ms=TTL_MS, fail_fast=True) == "queued"
    assert (await queue.stats()).depth == 1
    (claim,) = await take(broker, "e0", 5)
    await enqueue(broker, "b")
    assert await broker.enqueue("a", b"p", result_ttl_ms=TTL_MS, call="y") == "claimed"
    await finish_with(broker, claim, num_output=1)
    assert await broker.enqueue("a", b"p", result_ttl_ms=TTL_MS, call="y") == "finished"
    assert await broker.enqueue("a", b"p", result_ttl_ms=TTL_MS, call="x") == NEW


async def test_many_are_answered_each_for_itself(broker: Broker, queue: Queue) -> None:
    await queue.configure(QueuePolicy(max_queue_depth=4))
    await queue.configure_tenant("small", TenantPolicy(max_queue_depth=1))
    one_a_minute = TenantPolicy(requests_per_minute=1, over_quota=OverQuota.REFUSE)
    await queue.configure_tenant("slow", one_a_minute)
    asked = [
        ("a", {}),
        ("small0", {"tenant": "small"}),
        ("small1", {"tenant": "small"}),
        ("a", {}),
        ("slow0", {"tenant": "slow"}),
        ("slow1", {"tenant": "slow"}),
        ("b", {"band": "nowhere"}),
        ("c", {"fail_fast": True}),
        ("d", {}),
        ("e", {}),
        ("d", {}),
    ]
    entries = [Entry(request_id=name, payload=b"p", result_ttl_ms=TTL_MS, **options) for name, options in asked]
    answers = await broker.enqueue_many(entries)
    kinds = [type(answer) if isinstance(answer, PenstockError) else answer for answer in answers]
    for_small = [NEW, QueueFullError, "queued"]
    assert kinds == [NEW, *for_small, NEW, QuotaExceededError, ValidationError, UNSERVED, NEW, QueueFullError, "queued"]
    assert "tenant 'small'" in str(answers[2])
    assert "the model" in str(answers[9])
    started = [claim.request_id for claim in await take(broker, "e0", 9)]
    assert sorted(started) == ["a", "d", "slow0", "small0"]


async def test_many_enter_their_lanes_in_order(broker: Broker, queue: Queue) -> None:
    entries = [
        Entry(request_id=f"{tenant}{i}", payload=b"%d" % i, result_ttl_ms=TTL_MS, tenant=tenant, max_tokens=1)
        for i in range(50)
        for tenant in "ab"
    ]
    assert await broker.enqueue_many(entries) == [NEW] * 100
    assert await broker.enqueue_many([]) == []
    assert (await queue.stats()).depth == 100
    wave = await take(broker, "e0", 100)
    for tenant in "ab":
        of_tenant = [claim for claim in wave if claim.request_id.startswith(tenant)]
        assert [claim.request_id for claim in of_tenant] == [f"{tenant}{i}" for i in range(50)]
        assert [claim.payload for claim in of_tenant] == [b"%d" % i for i in range(50)]
