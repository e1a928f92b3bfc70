"""What a client asks of the queue: urgency, deadlines, bounds, a look at it, a pause."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from penstock.producer import Client, SamplingParams
from penstock.shared import errors
from penstock.shared.broker import Broker, Claim, EngineCapacity, Record
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.queue.policy import OverQuota, QueuePolicy, TenantPolicy

from .harness import claim_one, until, write


async def claimed_ids(broker: Broker, limit: int = 16) -> list[str]:
    return [claim.request_id for claim in (await broker.claim("e0", EngineCapacity(max_num_seqs=limit))).claims]


async def test_band_and_tenant_of_a_request_are_sent_and_the_band_decides_the_order(
    client: Client, broker: Broker
) -> None:
    await client.submit("hi", request_id="later", band="batch")
    await client.submit("hi", request_id="usual")
    await client.submit("hi", request_id="now", band="interactive", tenant="acme")
    claims = (await broker.claim("e0", EngineCapacity(max_num_seqs=16))).claims
    assert [claim.request_id for claim in claims] == ["now", "usual", "later"]
    request = msgspec.msgpack.decode(claims[0].payload, type=EngineCoreRequest)
    assert (request.tenant, request.band) == ("acme", "interactive")


async def test_requests_count_for_the_tenant_of_the_client_unless_they_name_another(
    redis_url, namespace, broker
) -> None:
    async with Client.connect(redis_url, namespace=namespace, tenant="shop") as client:
        await client.submit("hi")
        await client.submit("hi", tenant="other")
        stats = await client.queue_stats()
    assert {(tenant.tenant, tenant.depth) for tenant in stats.tenants} == {("shop", 1), ("other", 1)}


async def test_a_request_that_times_out_in_the_queue_never_runs(client: Client, broker: Broker) -> None:
    """No engine or reaper checks here, so the client makes the broker end the request."""
    deltas = [delta async for delta in client.stream("hi", request_id="r", timeout_s=0.05)]
    assert [(delta.token_ids, delta.finish_reason) for delta in deltas] == [([], FinishReason.EXPIRED)]
    assert await claimed_ids(broker) == []
    assert (await client.status("r")).state == "expired"


async def test_a_request_that_times_out_while_running_ends_with_its_tokens(client: Client, broker: Broker) -> None:
    for life_s in (0.3, 3.0, 30.0):  # as long as this machine needs to come to its first tokens
        request_id = f"r{life_s}"
        running = asyncio.ensure_future(client.generate("hi", request_id=request_id, deadline=time.time() + life_s))
        wave: list[Claim] = []
        while not wave and not running.done():
            wave = (await broker.claim("e0", EngineCapacity(max_num_seqs=1))).claims
        record = [Record(one.request_id, one.epoch, Delta(token_ids=[65, 66], text="AB")) for one in wave]
        has_begun = bool(wave) and await broker.append(record) == []
        output = await running
        assert output.outputs[0].finish_reason == "expired"
        if has_begun:
            assert 0 < wave[0].expires_in_ms <= 1000 * life_s + 700
            assert output.text == "AB"
            return
    pytest.fail("it was over each time before it had begun")


async def test_the_earlier_of_deadline_and_timeout_holds(client: Client, broker: Broker) -> None:
    await client.submit("hi", request_id="a", deadline=time.time() + 3600, timeout_s=5)
    await client.submit("hi", request_id="b", deadline=time.time() + 5, timeout_s=3600)
    for request_id in ("a", "b"):
        deadline = (await client.status(request_id)).deadline
        assert deadline is not None
        assert 0 < deadline - time.time() < 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 0}, "timeout_s must be a positive number of seconds, got 0"),
        ({"timeout_s": float("inf")}, "timeout_s must be"),
        ({"deadline": "tomorrow"}, "deadline must be a positive number of seconds, got 'tomorrow'"),
        ({"deadline": True}, "deadline must be"),
        ({"band": "urgent"}, "band must be one of interactive, standard, batch, got 'urgent'"),
        ({"band": ""}, "band must be a string of 1 to"),
        ({"tenant": ""}, "tenant must be a string of 1 to"),
        ({"tenant": "a{b"}, "tenant must hold no braces"),
    ],
)
async def test_bad_options_are_refused_by_name(client: Client, broker: Broker, options, message: str) -> None:
    with pytest.raises(errors.ValidationError, match=message):
        await client.submit("hi", **options)
    assert (await client.queue_stats()).depth == 0


async def test_a_full_queue_returns_a_retry_delay(client: Client, broker: Broker) -> None:
    await client.configure_queue(QueuePolicy(max_queue_depth=2, tenant=TenantPolicy(max_queue_tokens=100)))
    await client.submit("hi", SamplingParams(max_tokens=90), request_id="a")
    with pytest.raises(errors.QueueFullError, match="tenant 'default' is full: max_queue_tokens is 100 tokens"):
        await client.generate("hi", SamplingParams(max_tokens=90))
    await client.submit("hi", tenant="other")
    with pytest.raises(errors.QueueFullError, match="the model is full: max_queue_depth is 2 requests") as caught:
        await client.generate("hi", tenant="third")
    assert 0.1 <= caught.value.retry_after_s <= 3600
    assert caught.value.retryable
    again = await client.submit("hi", SamplingParams(max_tokens=90), request_id="a")
    assert again.request_id == "a"  # known, so it is attached to
    assert (await client.queue_stats()).depth == 2


async def test_a_tenant_over_its_quota_waits_or_is_refused(client: Client, broker: Broker) -> None:
    await client.configure_tenant("slow", TenantPolicy(max_concurrent_requests=1))
    await client.configure_tenant("strict", TenantPolicy(requests_per_minute=1, over_quota=OverQuota.REFUSE))
    for name in ("first", "second"):
        await client.submit("hi", request_id=name, tenant="slow")
    await client.submit("hi", request_id="once", tenant="strict")
    assert sorted(await claimed_ids(broker)) == ["first", "once"]
    with pytest.raises(errors.QuotaExceededError, match="1 requests per minute") as caught:
        await client.submit("hi", tenant="strict")
    assert 1 < caught.value.retry_after_s <= 62
    await client.configure_tenant("strict", None)
    await client.submit("hi", request_id="again", tenant="strict")
    await client.cancel("first")
    assert sorted(await claimed_ids(broker)) == ["again", "second"]


async def test_submit_many_keeps_the_order_and_each_its_own_parameters(client: Client, broker: Broker) -> None:
    params = [SamplingParams(max_tokens=1 + i % 7) for i in range(300)]
    handles = await client.submit_many([f"prompt {i}" for i in range(300)], params, band="batch")
    claims = (await broker.claim("e0", EngineCapacity(max_num_seqs=300))).claims
    assert [claim.request_id for claim in claims] == [handle.request_id for handle in handles]
    requests = [msgspec.msgpack.decode(claim.payload, type=EngineCoreRequest) for claim in claims]
    assert [request.prompt for request in requests] == [f"prompt {i}" for i in range(300)]
    assert [r.sampling_params.max_tokens for r in requests if r.sampling_params] == [p.max_tokens for p in params]
    assert len({r.sampling_params.seed for r in requests if r.sampling_params}) == 300
    await write(broker, claims[7], 0, 65, end=FinishReason.STOP)
    assert (await handles[7].result()).text == "A"


async def test_submit_many_leaves_nothing_behind_when_one_is_refused(client: Client, broker: Broker) -> None:
    await client.configure_queue(QueuePolicy(max_queue_depth=200))
    with pytest.raises(errors.QueueFullError):
        await client.submit_many(["hi"] * 300)
    with pytest.raises(errors.PayloadTooLargeError):
        await client.submit_many([*["hi"] * 150, "x" * 5_000_000])
    with pytest.raises(errors.ValidationError, match=r"prompt\[1\] must not be empty"):
        await client.submit_many(["hi", ""])
    with pytest.raises(errors.ValidationError, match="as many as the prompts"):
        await client.submit_many(["hi"], [SamplingParams()] * 2)
    with pytest.raises(errors.ValidationError, match="takes no request_id"):
        await client.submit_many(["hi"], request_id="r")
    assert await client.submit_many([]) == []
    assert (await client.queue_stats()).depth == 0


async def test_many_tasks_that_enqueue_at_once_each_get_their_own_answer(client: Client, broker: Broker) -> None:
    await client.configure_queue(QueuePolicy(max_queue_depth=50))
    results = await asyncio.gather(*(client.submit("hi") for _ in range(80)), return_exceptions=True)
    assert sum(isinstance(result, errors.QueueFullError) for result in results) == 30
    assert (await client.queue_stats()).depth == 50


async def test_status_has_position_and_estimated_start(client: Client, broker: Broker) -> None:
    for i in range(4):
        await client.submit("hi", SamplingParams(max_tokens=9), request_id=f"r{i}")
    assert (await client.status("r3")).estimated_start_s is None
    (claim,) = (await broker.claim("e0", EngineCapacity(max_num_seqs=1))).claims
    await asyncio.sleep(0.02)  # served in some time, so that there is a rate
    await write(broker, claim, 0, 65, end=FinishReason.STOP)
    last, ended = await client.status("r3"), await client.status("r0")
    assert (last.state, last.position, last.num_attempts) == ("queued", 2, 0)
    assert last.estimated_start_s is not None
    assert last.estimated_start_s > 0.02
    assert (ended.state, ended.position, ended.num_attempts, ended.num_output_tokens) == ("finished", None, 1, 1)
    with pytest.raises(errors.RequestNotFoundError, match="'nobody'"):
        await client.status("nobody")


async def test_stats_are_split_by_band_and_tenant(client: Client, broker: Broker) -> None:
    await client.submit("hi", SamplingParams(max_tokens=9), tenant="a", band="batch")
    await client.submit_many(["hi"] * 3, SamplingParams(max_tokens=9), tenant="b")
    stats = await client.queue_stats()
    assert {band.band: band.depth for band in stats.bands} == {"interactive": 0, "standard": 3, "batch": 1}
    assert [(t.tenant, lane.band, lane.depth, lane.num_tokens) for t in stats.tenants for lane in t.lanes] == [
        ("b", "standard", 3, 30),
        ("a", "batch", 1, 10),
    ]
    assert stats.num_tokens == 40
    assert (await client.queue_stats(tenants=False)).tenants == []


@pytest.mark.parametrize("wait", [False, True])
async def test_a_pause_holds_waiting_requests_and_loses_none(client: Client, broker: Broker, wait: bool) -> None:
    running = asyncio.ensure_future(client.generate("hi", request_id="running"))
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65)
    waiting = asyncio.ensure_future(client.generate("hi", request_id="waiting"))
    pausing = asyncio.ensure_future(client.pause_generation(wait_for_inflight_requests=wait))

    async def is_paused() -> bool:
        return await client.is_paused()

    await until(is_paused)
    assert await claimed_ids(broker) == []
    if wait:
        assert not pausing.done()
        await write(broker, claim, 1, 66, end=FinishReason.STOP)
        assert (await running).text == "AB"
    await pausing
    await client.pause_generation()  # a second time does nothing
    assert await claimed_ids(broker) == []
    await client.resume_generation()
    assert not await client.is_paused()
    for again in (await broker.claim("e0", EngineCapacity(max_num_seqs=16))).claims:
        await write(broker, again, again.num_logged_tokens, 67, end=FinishReason.STOP)
    assert (await waiting).text == "C"
    assert (await running).text == ("AB" if wait else "AC")


async def test_purge_cancels_waiting_requests_of_a_tenant(client: Client, broker: Broker) -> None:
    handles = await client.submit_many(["hi"] * 5, tenant="gone")
    await client.submit("hi", request_id="stays")
    assert await client.purge("gone", band="batch") == 0
    assert await client.purge("gone") == 5
    assert (await handles[3].result()).outputs[0].finish_reason == "cancelled"
    assert await claimed_ids(broker) == ["stays"]
    with pytest.raises(errors.ValidationError, match="band must be one of"):
        await client.purge("gone", band="nope")
