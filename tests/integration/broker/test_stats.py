"""What the queue says of itself: sums, tenants, where a request stands, and its policies."""

from __future__ import annotations

import msgspec
import pytest

from penstock.shared.broker import Broker, Queue
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import ConfigurationError, QueueFullError
from penstock.shared.queue.policy import Order, OverQuota, QueuePolicy, TenantPolicy
from penstock.shared.queue.stats import RequestStatus

from .conftest import CAUSE, enqueue, final, record, take


async def learn_rate(broker: Broker, commands: CommandConnection, *, seconds_ago: int = -3600) -> None:
    """Count five requests and 500 tokens as served in each of two seconds, by one slot.

    The seconds end in the future by default, so that no time passes since, however slow this machine is.
    """
    queue, (seconds, micros) = broker.keys.prefix + "queue", await commands.execute("TIME")
    now_ms = 1000 * (int(seconds) - seconds_ago) + int(micros) // 1000
    await commands.execute("HSET", queue, "rate_held_ms", 2000, "rate_ended_ms", 2000, "held_at", now_ms)
    for band in ("interactive", "standard", "batch"):
        entered = int(await commands.execute("HGET", queue, f"entered:{band}") or 0)
        sums = f"2000 {10 / 3} {1000 / 3} 0"
        share = f"{now_ms} {sums} {sums} {1000 / 3} {2000 / 3} {entered}"
        await commands.execute("HSET", queue, f"rate:{band}", share)


async def status_of(queue: Queue, request_id: str) -> RequestStatus:
    status = await queue.status(request_id)
    assert status is not None
    return status


async def positions(queue: Queue, *request_ids: str) -> list[int | None]:
    return [(await status_of(queue, request_id)).position for request_id in request_ids]


async def test_stats_of_an_empty_queue_are_zero(queue: Queue) -> None:
    stats = await queue.stats(tenants=True)
    assert (stats.model, stats.is_paused, stats.depth, stats.num_tokens, stats.num_running) == ("m", False, 0, 0, 0)
    assert (stats.num_returned, stats.oldest_age_s, stats.estimated_wait_s) == (0, 0.0, None)
    assert (stats.requests_per_s, stats.tokens_per_s, stats.tenants) == (0.0, 0.0, [])
    assert [band.band for band in stats.bands] == ["interactive", "standard", "batch"]
    assert await queue.tenants() == []
    assert await queue.status("nobody") is None


async def test_sums_of_the_queue_its_bands_and_tenants(broker: Broker, queue: Queue, commands) -> None:
    await enqueue(broker, "s0", "s1", "s2", tenant="t", num_prompt_tokens=60, max_tokens=40)
    await enqueue(broker, "b0", "b1", tenant="t", band="batch", num_prompt_tokens=60, max_tokens=40)
    await enqueue(broker, "i0", tenant="u", band="interactive", num_prompt_tokens=60, max_tokens=40)
    await enqueue(broker, "s3", tenant="u", num_prompt_tokens=60, max_tokens=40)
    first = await take(broker, "e0", 2)
    assert await broker.release([(first[0].request_id, first[0].epoch)]) == 1
    await learn_rate(broker, commands)
    stats = await queue.stats(tenants=True)
    assert (stats.depth, stats.num_tokens, stats.num_running, stats.num_returned) == (6, 500, 1, 1)
    assert [(band.depth, band.num_tokens, band.num_tenants) for band in stats.bands] == [
        (0, 0, 0),
        (3, 300, 2),
        (2, 200, 1),
    ]
    assert (stats.requests_per_s, stats.tokens_per_s) == pytest.approx((5, 500), rel=0.1)
    assert (stats.num_engines, stats.full_tokens_per_s) == (1, pytest.approx(500))
    # One was handed back and goes first; each takes 0.2 s of the one slot.
    waits = [band.estimated_wait_s for band in stats.bands]
    assert waits == pytest.approx([2 / 5, 4 / 5, 6 / 5], rel=0.1)
    assert stats.estimated_wait_s == waits[1]
    assert 0 <= stats.oldest_age_s < 60
    t, u = stats.tenants
    assert (t.tenant, t.depth, t.num_running, t.weight, t.blocked_for_s) == ("t", 4, 1, 1.0, 0.0)
    assert (u.tenant, u.depth, u.num_running) == ("u", 1, 1)
    assert [(lane.band, lane.depth, lane.num_tokens) for lane in t.lanes] == [("standard", 2, 200), ("batch", 2, 200)]
    assert [lane.estimated_wait_s for lane in t.lanes] == pytest.approx([4 / 5, 6 / 5], rel=0.1)
    assert await queue.tenants() == ["t", "u"]


async def test_how_old_the_oldest_is(broker: Broker, queue: Queue, commands) -> None:
    await enqueue(broker, "a", "b", tenant="t")
    heads = broker.keys.prefix + "heads:standard"
    await commands.execute("ZINCRBY", heads, -600_000, "t")
    stats = await queue.stats(tenants=True)
    ages = (stats.oldest_age_s, stats.bands[1].oldest_age_s, stats.tenants[0].lanes[0].oldest_age_s)
    assert all(600 <= age < 700 for age in ages)
    await take(broker, "e0", 1)
    assert (await queue.stats()).oldest_age_s < 100


@pytest.mark.parametrize("order", list(Order))
async def test_the_place_in_line(broker: Broker, queue: Queue, order: Order) -> None:
    """The number of requests that are going to start before, as claims then show."""
    await queue.configure(QueuePolicy(order=order))
    deadlines = {"a": None, "b": 300_000, "c": 100_000, "d": None, "e": 200_000}
    for request_id, timeout_ms in deadlines.items():
        await enqueue(broker, request_id, tenant="t", timeout_ms=timeout_ms)
    await enqueue(broker, "other", tenant="u")
    expected = ["a", "b", "c", "d", "e"] if order == Order.FCFS else ["c", "e", "b", "a", "d"]
    assert await positions(queue, *expected[:3]) == [0, 1, 2]
    # At most so many, where some of those before it are counted twice.
    fourth, fifth = await positions(queue, *expected[3:])
    assert fourth in (3, 4)
    assert fifth == 4
    started = [claim.request_id for claim in await take(broker, "e0", 6) if claim.request_id != "other"]
    assert started == expected
    assert await positions(queue, "a", "other") == [None, None]


async def test_the_place_in_line_moves_up(broker: Broker, queue: Queue) -> None:
    await enqueue(broker, *"abcd", tenant="t")
    assert await positions(queue, *"abcd") == [0, 1, 2, 3]
    (claim,) = await take(broker, "e0", 1)
    assert await positions(queue, *"abcd") == [None, 0, 1, 2]
    await broker.cancel("b")
    assert await positions(queue, *"abcd") == [None, None, 0, 1]
    await broker.release([("a", claim.epoch)])
    assert await positions(queue, *"abcd") == [0, None, 0, 1]
    # Not counted before the first: who was cancelled in the middle is, until it would have been its turn.
    await broker.cancel("c")
    await broker.cancel("a")
    assert await positions(queue, *"abcd") == [None, None, None, 0]


async def test_a_foreign_entry_in_a_lane_does_not_affect_requests(broker: Broker, queue: Queue, commands) -> None:
    await commands.execute("XADD", broker.keys.lane("standard", "t"), "*", "who", "knows")
    await enqueue(broker, "a", tenant="t")
    assert await positions(queue, "a") == [0]
    assert (await queue.stats(tenants=True)).depth == 1


async def test_everything_about_one_request(broker: Broker, queue: Queue) -> None:
    await enqueue(broker, "a", tenant="t", band="batch", timeout_ms=600_000)
    waiting = await status_of(queue, "a")
    assert (waiting.state, waiting.tenant, waiting.band, waiting.engine_id) == ("queued", "t", "batch", "")
    assert (waiting.num_attempts, waiting.num_output_tokens) == (0, 0)
    assert waiting.deadline is not None
    (claim,) = await take(broker, "e0", 1)
    await broker.append([record("a", claim.epoch, 0, 1, 2, 3)])
    running = await status_of(queue, "a")
    assert (running.state, running.engine_id, running.num_attempts) == ("claimed", "e0", 1)
    assert (running.num_output_tokens, running.position, running.estimated_start_s) == (3, None, None)
    assert running.deadline == waiting.deadline
    await broker.reclaim("e0", CAUSE, is_external=False, max_deliveries=3)
    suspect = await status_of(queue, "a")
    assert (suspect.state, suspect.engine_id, suspect.position) == ("queued", "", 0)
    await broker.cancel("a")
    ended = await status_of(queue, "a")
    assert (ended.state, ended.position, ended.estimated_start_s) == ("cancelled", None, None)
    assert (ended.num_output_tokens, ended.num_attempts) == (3, 1)


async def test_when_a_request_is_going_to_start(broker: Broker, queue: Queue, commands) -> None:
    """Counts requests of higher bands, earlier requests and other tenants' turns; unknown without engines."""

    async def estimate() -> float | None:
        await learn_rate(broker, commands)  # anew, since each command changes it
        return (await status_of(queue, "r2")).estimated_start_s

    await enqueue(broker, "r0", "r1", "r2", "r3", tenant="t", num_prompt_tokens=60, max_tokens=40)
    assert await estimate() is None
    await enqueue(broker, "first", band="interactive")
    await take(broker, "e0", 1)
    await broker.cancel("r0")
    assert await estimate() == pytest.approx(2 / 5, rel=0.1)
    await enqueue(broker, "above", band="interactive", num_prompt_tokens=60, max_tokens=40)
    assert await estimate() == pytest.approx(3 / 5, rel=0.1)
    await enqueue(broker, "other", tenant="u", num_prompt_tokens=60, max_tokens=40)
    assert await estimate() == pytest.approx(4 / 5, rel=0.1)
    await enqueue(broker, "below", band="batch", num_prompt_tokens=5000)
    assert await estimate() == pytest.approx(4 / 5, rel=0.1)
    await queue.pause(put_back=False)
    assert await estimate() is None
    await queue.resume()
    await broker.reclaim("e0", CAUSE, is_external=True, max_deliveries=3)
    assert await estimate() is None


async def test_rates_fall_to_zero_while_nothing_is_served(broker: Broker, queue: Queue, commands) -> None:
    await learn_rate(broker, commands, seconds_ago=30)
    half_a_minute = await queue.stats()
    assert 0.01 < half_a_minute.requests_per_s < 1
    await learn_rate(broker, commands, seconds_ago=600)
    long_ago = await queue.stats()
    assert (long_ago.requests_per_s, long_ago.tokens_per_s) == pytest.approx((0, 0), abs=1e-6)


async def test_served_requests_are_measured_by_band(broker: Broker, queue: Queue, commands) -> None:
    await enqueue(broker, "a", "b", "c", num_prompt_tokens=6, max_tokens=10)
    await enqueue(broker, "d", band="batch", num_prompt_tokens=6, max_tokens=10)
    for claim in await take(broker, "e0", 3):
        await broker.finish([final(claim.request_id, claim.epoch, 0, 1, 2)])
    state = (await queue.read_snapshot()).state
    ended = {band.band: band.rates for band in state.bands}
    assert [ended[name].ended for name in ("interactive", "standard", "batch")] == pytest.approx([0, 3, 0], rel=0.1)
    assert ended["standard"].tokens == pytest.approx(3 * 16, rel=0.1)
    assert ended["standard"].computed_tokens == pytest.approx(3 * 8, rel=0.1)


@pytest.mark.parametrize("text", ["nonsense", "1 2 3", "x " * 8, ""])
async def test_a_measure_that_others_have_written_counts_as_none(
    broker: Broker, queue: Queue, commands, text: str
) -> None:
    await commands.execute("HSET", broker.keys.prefix + "queue", "rate:standard", text)
    assert (await queue.stats()).requests_per_s == 0.0
    await enqueue(broker, "a")
    (claim,) = await take(broker, "e0", 1)
    await broker.finish([final("a", claim.epoch, 0, 1)])
    assert (await queue.read_snapshot()).state.bands[1].rates.ended == pytest.approx(1, rel=0.1)


async def test_policies_are_read_back_as_set(queue: Queue) -> None:
    assert await queue.policy() == QueuePolicy()
    assert await queue.tenant_policies() == {}
    tenant = TenantPolicy(weight=0.5, requests_per_minute=1, tokens_per_minute=2, over_quota=OverQuota.REFUSE)
    policy = QueuePolicy(
        bands=("now", "later"),
        default_band="later",
        ageing_s=None,
        strictness=1.0,
        order=Order.EDF,
        max_queue_depth=None,
        max_queue_tokens=10**12,
        tenant=tenant,
    )
    await queue.configure(policy)
    assert await queue.policy() == policy
    own = TenantPolicy(max_concurrent_requests=3, max_queue_depth=4, max_queue_tokens=5)
    await queue.configure_tenant("ü:x", own)
    await queue.configure_tenant("y", tenant)
    assert await queue.tenant_policies() == {"ü:x": own, "y": tenant}
    await queue.configure_tenant("y", None)
    assert await queue.tenant_policies() == {"ü:x": own}


@pytest.mark.parametrize("data", [b'{"no_such_field": 1}', b'{"strictness": 7}', b'{"bands": 3}', b"nonsense"])
async def test_a_policy_of_a_newer_version_is_an_error_that_names_the_cause(
    broker: Broker, queue: Queue, commands, data: bytes
) -> None:
    await commands.execute("SET", broker.keys.policy, data)
    with pytest.raises(ConfigurationError, match="the policy in Redis cannot be read"):
        await queue.policy()


async def test_fields_that_an_older_version_did_not_write_have_their_defaults(
    broker: Broker, queue: Queue, commands
) -> None:
    """Covers the scripts too, which read these fields on their own."""
    old = {"bands": ["a", "standard"], "tenant": {"requests_per_minute": 1}}
    await commands.execute("SET", broker.keys.policy, msgspec.json.encode(old))
    await commands.execute("HSET", broker.keys.tenant_policies, "t", msgspec.json.encode({"max_queue_depth": 2}))
    assert await queue.policy() == QueuePolicy(bands=("a", "standard"), tenant=TenantPolicy(requests_per_minute=1))
    assert await queue.tenant_policies() == {"t": TenantPolicy(max_queue_depth=2)}
    await enqueue(broker, "t0", "t1", tenant="t")
    await enqueue(broker, "u0", "u1", tenant="u", band="a")
    with pytest.raises(QueueFullError):
        await enqueue(broker, "t2", tenant="t")
    assert [claim.request_id for claim in await take(broker, "e0", 9)] == ["u0", "t0", "t1"]
    stats = await queue.stats(tenants=True)
    assert [(tenant.tenant, tenant.weight) for tenant in stats.tenants] == [("u", 1.0), ("t", 1.0)]
