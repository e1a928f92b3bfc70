"""The clock of a real Redis is set back or forward, and nobody is lost, doubled or taken for alive by it.

The test moves time on by the same clock, so that it waits for nothing and knows what is due.
"""

from __future__ import annotations

import asyncio

import pytest

from penstock.producer.background.agenda import Agenda
from penstock.producer.batches.files import SCRIPTS as BATCH_SCRIPTS
from penstock.shared.broker import Broker, EngineCapacity, Queue, ReapResult
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.groups import Membership, Standing
from penstock.shared.deployment.presence import drop_overdue
from penstock.shared.keys import Keys
from penstock.shared.queue.lifecycle import RequestState
from penstock.shared.queue.policy import Order, QueuePolicy, TenantPolicy
from penstock.shared.queue.state import QueueState

from ...moved_clock import MovedClock
from .conftest import CAUSE, enqueue, final, held, take
from .test_input import chunk, open_request, segment

# So long that a busy machine does not let it end between two lines of a test.
LEASE_S = 300.0
LEASE_MS = 1000 * int(LEASE_S)
LOOK_EVERY_S = 1.5
# Of the clock, many leases.
BACK_S = -3600.0
BOTH = (BACK_S, -BACK_S)


@pytest.fixture(autouse=True)
def _no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of a busy machine between two looks of the reaper is no gap, and a moved clock is one."""
    monkeypatch.setattr("penstock.shared.broker.broker.MAX_REAP_GAP_MS", 300_000)


async def reap(broker: Broker) -> list[ReapResult]:
    return await broker.reap(CAUSE, max_deliveries=3, lease_ttl_ms=LEASE_MS)


async def look(broker: Broker) -> list[ReapResult]:
    """Reap twice: after a gap between two looks nobody is taken for dead before everybody had a lease to renew."""
    return [*await reap(broker), *await reap(broker)]


async def pass_time(broker: Broker, clock: MovedClock, seconds: float) -> list[ReapResult]:
    """Let so much time pass, in which a reaper looks every ``LOOK_EVERY_S``; returns what it finds.

    The true time passes as well: on a busy machine more passes than ``seconds``.
    """
    found: list[ReapResult] = []
    whole, rest = divmod(seconds, LOOK_EVERY_S)
    for step_s in [LOOK_EVERY_S] * int(whole) + [rest]:
        clock.move(step_s)
        found += await reap(broker)
    return found


async def test_a_dead_engine_is_detected_one_lease_after_the_clock_went_back(clock: MovedClock, broker: Broker) -> None:
    await enqueue(broker, "a", "b")
    await look(broker)
    await take(broker, "e0", 2, lease_ttl_ms=LEASE_MS)
    clock.move(BACK_S)
    found = await pass_time(broker, clock, LEASE_S + 3)
    assert [(one.kind, one.name, one.num_requests) for one in found] == [("engine", "e0", 2)]
    assert {claim.request_id: claim.attempt for claim in await take(broker, "e1", 2)} == {"a": 2, "b": 2}
    assert await broker.append([]) == []
    assert await broker.renew("e0", [held("a"), held("b")]) == ["a", "b"]


@pytest.mark.parametrize("by_s", BOTH)
async def test_a_living_engine_keeps_its_claims(clock: MovedClock, broker: Broker, by_s: float) -> None:
    await enqueue(broker, "a")
    await look(broker)
    await take(broker, "e0", 1, lease_ttl_ms=LEASE_MS)
    clock.move(by_s)
    assert await look(broker) == []
    for _ in range(3):
        assert await broker.renew("e0", [held("a")], lease_ttl_ms=LEASE_MS) == []
        assert await pass_time(broker, clock, LEASE_S / 3) == []
    assert await broker.finish([final("a", 1, 0, 7)]) == []
    assert await broker.state("a") is RequestState.FINISHED


async def test_an_engine_that_has_not_renewed_yet_keeps_its_claims_for_a_lease(
    clock: MovedClock, broker: Broker
) -> None:
    await enqueue(broker, "a")
    await look(broker)
    await take(broker, "e0", 1, lease_ttl_ms=LEASE_MS)
    clock.move(BACK_S)
    assert await pass_time(broker, clock, LEASE_S / 2) == []
    assert await broker.renew("e0", [held("a")], lease_ttl_ms=LEASE_MS) == []


async def test_requests_of_a_vanished_client_are_cancelled_one_lease_later(clock: MovedClock, broker: Broker) -> None:
    await look(broker)
    await enqueue(broker, "dead", client_id="c0", client_ttl_ms=LEASE_MS)
    await enqueue(broker, "living", client_id="c1", client_ttl_ms=LEASE_MS)
    clock.move(BACK_S)
    await pass_time(broker, clock, LEASE_S / 2)
    await broker.renew_client("c1", LEASE_MS)
    found = await pass_time(broker, clock, LEASE_S / 2 + 3)
    assert [(one.kind, one.name, one.num_requests) for one in found] == [("client", "c0", 1)]
    assert await broker.state("living") is RequestState.QUEUED


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("is_claimed", [False, True])
async def test_a_timeout_is_never_longer_than_itself(
    clock: MovedClock, broker: Broker, queue: Queue, is_claimed: bool, order: Order
) -> None:
    await queue.configure(QueuePolicy(order=order))
    await look(broker)
    seconds, _ = await broker._connection.execute("TIME")
    await enqueue(broker, "timeout", timeout_ms=60_000)
    await enqueue(broker, "deadline", deadline_ms=1000 * int(seconds) + 60_000)
    await enqueue(broker, *(f"r{i}" for i in range(600)), timeout_ms=60_000)
    if is_claimed:
        assert len(await take(broker, "e0", 602)) == 602
    clock.move(BACK_S)
    await pass_time(broker, clock, 50)
    assert await broker.state("timeout") is (RequestState.CLAIMED if is_claimed else RequestState.QUEUED)
    await pass_time(broker, clock, 14)
    assert {await broker.state(f"r{i}") for i in range(600)} | {await broker.state("timeout")} == {RequestState.EXPIRED}
    # A time of day is what its caller has asked for.
    assert await broker.state("deadline") is (RequestState.CLAIMED if is_claimed else RequestState.QUEUED)


@pytest.mark.parametrize("by_s", [-3600.0, -90.0, -30.0])
async def test_a_tenant_over_quota_is_served_again_within_a_minute(
    clock: MovedClock, broker: Broker, queue: Queue, by_s: float
) -> None:
    await queue.configure_tenant("t", TenantPolicy(requests_per_minute=1))
    await look(broker)
    await enqueue(broker, "a", "b", tenant="t")
    assert [claim.request_id for claim in await take(broker, "e0", 2)] == ["a"]
    clock.move(by_s)
    await pass_time(broker, clock, 65)
    assert [claim.request_id for claim in await take(broker, "e0", 2)] == ["b"]


async def test_waiting_requests_age_by_the_present_clock(clock: MovedClock, broker: Broker, queue: Queue) -> None:
    await look(broker)
    await enqueue(broker, "before")
    clock.move(-3600)
    await look(broker)
    # It stands in a lane that the clock is behind of.
    await enqueue(broker, "after")
    await pass_time(broker, clock, 40)
    ages = [band.oldest_age_s for band in (await queue.stats()).bands if band.depth]
    assert ages == [pytest.approx(40, abs=30)]
    wave = await broker.claim("e0", EngineCapacity(max_num_seqs=8))
    assert [claim.request_id for claim in wave.claims] == ["before", "after"]
    assert [claim.waited_ms >= 40_000 for claim in wave.claims] == [True, True]
    assert max(claim.waited_ms for claim in wave.claims) < 600_000


async def test_a_suspect_runs_alone_on_an_engine(clock: MovedClock, broker: Broker) -> None:
    await look(broker)
    await enqueue(broker, "bad", "good")
    await take(broker, "e0", 1)
    assert await broker.reclaim("e0", CAUSE, is_external=False, max_deliveries=3) == (1, 0)
    await take(broker, "e1", 0, num_held=1)
    clock.move(-3600)
    # It never becomes idle by itself, so it has to be kept from new work until it does.
    assert await take(broker, "e1", 2, num_held=1) == []
    assert [claim.request_id for claim in await take(broker, "e1", 2)] == ["bad"]


async def test_a_place_that_is_kept_for_a_large_request_is_free_again_after_its_time(
    clock: MovedClock, broker: Broker
) -> None:
    await look(broker)
    await enqueue(broker, "large", num_prompt_tokens=90)
    full = EngineCapacity(max_num_seqs=4, num_seqs=1, num_kv_tokens=100, num_held_kv_tokens=50)
    assert (await broker.claim("e0", full)).is_saving
    clock.move(-3600)
    assert (await broker.claim("e1", full)).is_saving


async def test_a_replica_with_a_late_clock_does_not_reuse_epochs(
    clock: MovedClock, broker: Broker, commands: CommandConnection
) -> None:
    await enqueue(broker, "a")
    (first,) = await take(broker, "e0", 1)
    clock.move(BACK_S)
    await broker.release([held("a")])
    (second,) = await take(broker, "e0", 1)
    await broker.release([held("a", 2)])
    # A replica that has not heard of the second owner makes another one.
    await commands.execute("HSET", broker.keys.request("a"), "epoch", first.epoch)
    (third,) = await take(broker, "e0", 1)
    assert len({first.epoch, second.epoch, third.epoch}) == 3


async def test_items_of_the_agenda_are_due_in_their_own_time(
    clock: MovedClock, commands: CommandConnection, namespace: str
) -> None:
    agenda = Agenda(commands, Keys(namespace), lease_ttl_s=LEASE_S)
    await agenda.add("job", "later", 120.0)
    for item_id in ("dead", "living"):
        await agenda.add("job", item_id)
    assert await agenda.hold("job", "dead") is not None
    living = await agenda.hold("job", "living")
    assert living is not None
    clock.move(BACK_S)
    assert await agenda.due(9) == []
    clock.move(121.0)
    assert [item.item_id for item in await agenda.due(9)] == ["later"]
    keeping = asyncio.create_task(living.keep())
    await asyncio.sleep(0)  # it renews at once
    clock.move(LEASE_S)
    while {item.item_id for item in await agenda.due(9)} != {"dead", "later"}:
        await asyncio.sleep(0.01)
    keeping.cancel()
    assert await living.let_go(None)


async def test_the_lease_of_a_batch_ends_one_lease_later(
    clock: MovedClock, commands: CommandConnection, namespace: str
) -> None:
    keys = Keys(namespace).batches()
    await commands.run_script(BATCH_SCRIPTS["create"], [keys.batch("b"), keys.batches("t"), keys.open], ["b", "{}", 0])

    async def attempt_to_take(holder: str) -> bytes:
        answer = await commands.run_script(
            BATCH_SCRIPTS["claim"], [keys.batch("b"), keys.open], ["b", holder, LEASE_MS]
        )
        return answer[0]

    assert await attempt_to_take("first") == b"taken"
    clock.move(BACK_S)
    assert await attempt_to_take("second") == b"held"
    clock.move(LEASE_S + 1)
    assert await attempt_to_take("second") == b"taken"


async def test_a_group_does_not_wait_for_a_rank_that_died(
    clock: MovedClock, commands: CommandConnection, broker: Broker
) -> None:
    first, second, third = (
        Membership(commands, broker.keys, "g", name, ttl_ms=LEASE_MS) for name in ("first", "second", "third")
    )
    dead, place = await first.join(2), await second.join(2)
    assert dead is not None
    assert place is not None
    clock.move(BACK_S)
    assert await third.join(2) is None
    clock.move(LEASE_S - 10)
    assert (await second.renew(place)).standing is Standing.OK
    clock.move(20)
    assert (await second.renew(place)).standing is Standing.OVER
    assert await third.join(2) is not None


@pytest.mark.parametrize("by_s", BOTH)
async def test_a_group_that_serves_stays_together(
    clock: MovedClock, commands: CommandConnection, broker: Broker, by_s: float
) -> None:
    ranks = [Membership(commands, broker.keys, "g", name, ttl_ms=LEASE_MS) for name in ("first", "second")]
    places = [await rank.join(2) for rank in ranks]
    newcomer = Membership(commands, broker.keys, "g", "newcomer", ttl_ms=LEASE_MS)
    for rank, place in zip(ranks, places, strict=True):
        assert place is not None
        await rank.renew(place, address="here:1", serves=True, num_experts=4)
    clock.move(by_s)
    assert await newcomer.join(2) is None
    for rank, place in zip(ranks, places, strict=True):
        assert place is not None
        assert (await rank.renew(place, address="here:1", serves=True, num_experts=4)).standing is Standing.OK


async def test_records_of_dead_processes_expire(clock: MovedClock, commands: CommandConnection, namespace: str) -> None:
    keys = Keys(namespace)
    for ids_key, key, name in (
        (keys.engines(), keys.engine("e0"), "e0"),
        (keys.processes(), keys.process("jobs-1"), "jobs-1"),
    ):
        await commands.execute("SADD", ids_key, name)
        await commands.execute("SET", key, b"{}", "PX", 30_000)
    clock.move(-3600)
    await commands.execute("SADD", keys.engines(), "e1")
    await commands.execute("SET", keys.engine("e1"), b"{}", "PX", 30_000)
    await drop_overdue(commands.execute, keys)
    left = [await commands.execute("EXISTS", key) for key in (keys.engine("e0"), keys.process("jobs-1"))]
    assert left == [0, 0]
    assert await commands.execute("EXISTS", keys.engine("e1")) == 1


async def measured_state(queue: Queue) -> QueueState:
    return (await queue.read_snapshot()).state


async def finish_claim(broker: Broker, request_id: str, owner: int, index: int = 0) -> None:
    assert await broker.finish([final(request_id, owner, index, 1)]) == []


async def test_time_before_a_claim_does_not_count_as_work(clock: MovedClock, broker: Broker, queue: Queue) -> None:
    """Run one request for a minute, then claim two others, which take a second each."""
    await enqueue(broker, "a", "b", "c")
    await take(broker, "e0", 1)
    clock.move(60)
    await take(broker, "e0", 2, num_held=1)
    clock.move(1)
    for request_id in "abc":
        await finish_claim(broker, request_id, 1)
    state = await measured_state(queue)
    assert state.held_share == pytest.approx(1.0, abs=0.2)
    assert state.bands[1].rates.held_s == pytest.approx(63, rel=0.3)


async def test_a_running_request_counts_until_now(clock: MovedClock, broker: Broker, queue: Queue) -> None:
    """Requests take longer than the ended ones, as a running one shows."""
    await enqueue(broker, "a", "b")
    await take(broker, "e0", 2)
    clock.move(10)
    await finish_claim(broker, "a", 1)
    assert (await measured_state(queue)).held_share == pytest.approx(1.5, rel=0.2)
    clock.move(100)
    assert (await measured_state(queue)).held_share == pytest.approx(11.5, rel=0.2)


async def test_time_without_an_engine_does_not_count_as_work(clock: MovedClock, broker: Broker, queue: Queue) -> None:
    """A request that was returned to the queue waits there for 100 s. Another one runs meanwhile, and ends at last."""
    await enqueue(broker, "a", "b")
    claims = await take(broker, "e0", 2)
    clock.move(10)
    assert await broker.release([(claims[0].request_id, claims[0].epoch)]) == 1
    clock.move(100)
    await take(broker, "e1", 1)
    clock.move(10)
    await finish_claim(broker, "a", 2)
    await finish_claim(broker, "b", 1)
    state = await measured_state(queue)
    assert state.held_share == pytest.approx(1.0, abs=0.1)
    assert state.bands[1].rates.held_s == pytest.approx(10 + 10 + 120, rel=0.1)


async def test_time_without_input_does_not_count_as_work(clock: MovedClock, broker: Broker, queue: Queue) -> None:
    """All segments of a request count, and the time between them does not."""
    await open_request(broker)
    (first,) = await take(broker, "e0", 1)
    clock.move(20)
    assert await broker.end_segments([segment(first, 0, 0, 7)]) == []
    clock.move(100)
    assert await broker.input.extend("a", 1, chunk("b"))
    clock.move(100)
    (second,) = await take(broker, "e0", 1)
    clock.move(20)
    await broker.input.close("a")
    assert await broker.end_segments([segment(second, 1, 1, 8)]) == []
    state = await measured_state(queue)
    assert state.held_share == pytest.approx(1.0, abs=0.2)
    assert state.bands[1].rates.held_s == pytest.approx(40, rel=0.2)


async def test_claims_of_the_release_before_count_from_their_charge(
    clock: MovedClock, broker: Broker, queue: Queue, commands: CommandConnection
) -> None:
    """Neither requests nor the queue had the field held_at."""
    await enqueue(broker, "a", "b")
    await take(broker, "e0", 2)
    for key in (broker.keys.request("a"), broker.keys.request("b"), broker.keys.prefix + "queue"):
        assert await commands.execute("HDEL", key, "held_at") == 1
    clock.move(20)
    await finish_claim(broker, "a", 1)
    await finish_claim(broker, "b", 1)
    state = await measured_state(queue)
    assert state.held_share == pytest.approx(1.0, abs=0.2)
    assert state.bands[1].rates.held_s == pytest.approx(40, rel=0.2)
