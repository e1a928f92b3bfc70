"""Devices that may wake a model: who counts as served, what they read, and which of them wakes it."""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest

from penstock.shared.broker import (
    UNSERVED,
    Broker,
    Demand,
    EngineCapacity,
    GrantReply,
    Homes,
    Queue,
    RequestHistory,
)
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.errors import ModelBrokenError, ModelTooLargeError
from penstock.shared.queue.lifecycle import RequestState
from penstock.shared.queue.policy import TenantPolicy
from penstock.shared.queue.stats import ModelState
from penstock.shared.swap.views import SleepLevel, SwapOptions

from ..conftest import LONG_MS
from .conftest import CAUSE, TTL_MS, die, enqueue, final, held, take

ASLEEP, DISK = SleepLevel.HOST_MEMORY, SleepLevel.DISK


@pytest.fixture
def homes(commands: CommandConnection, broker: Broker) -> Homes:
    return Homes(commands, broker.keys)


async def enter(homes: Homes, device: str, wake_s: float = 1.0, level: SleepLevel = ASLEEP) -> None:
    await homes.renew(device, level, wake_s, lease_ttl_ms=LONG_MS)


async def test_a_model_that_only_sleeps_is_served(broker: Broker, homes: Homes) -> None:
    assert await broker.enqueue("early", b"p", result_ttl_ms=TTL_MS, fail_fast=True) == UNSERVED
    await enter(homes, "d0", level=DISK)
    await enqueue(broker, "a", fail_fast=True)
    await take(broker, "e0", 1)
    await broker.release([held("a")])
    await die(broker, "e0", external=True)
    assert await broker.state("a") is RequestState.QUEUED
    await homes.leave("d0")
    assert await broker.state("a") is RequestState.FAILED


async def test_a_dead_home_is_noticed(commands: CommandConnection, broker: Broker, homes: Homes) -> None:
    await enter(homes, "d0")
    await enqueue(broker, "a", fail_fast=True)
    await commands.execute("ZADD", homes.keys.homes, 0, "d0")
    for _ in range(3):
        await broker.reap(CAUSE, max_deliveries=3, lease_ttl_ms=0)
    assert await broker.state("a") is RequestState.FAILED
    assert (await homes.demand()).homes == ()


async def test_homes_hear_of_a_request_only_while_no_engine_claims(
    broker: Broker, homes: Homes, subscriber: Subscriber
) -> None:
    messages: list[bytes] = []
    await subscriber.subscribe(homes.keys.wanted, messages.append)

    barriers = itertools.count()

    async def num_messages() -> int:
        # Messages that were published before are here when this is subscribed.
        await subscriber.subscribe(broker.keys.output(f"barrier-{next(barriers)}"), lambda _: None)
        return len(messages)

    await enqueue(broker, "nobody-there")
    assert await num_messages() == 0
    await enter(homes, "d0")
    await enqueue(broker, "asleep")
    assert await num_messages() == 1
    await broker.claim("e0", EngineCapacity(max_num_seqs=2, num_seqs=2))  # awake, and full
    await enqueue(broker, "awake")
    assert await num_messages() == 1
    await broker.withdraw("e0")
    await enqueue(broker, "asleep-again")
    assert await num_messages() == 2


async def test_the_demand_is_what_engines_could_claim(broker: Broker, queue: Queue, homes: Homes) -> None:
    assert await homes.demand() == Demand()
    await queue.configure_tenant("slow", TenantPolicy(max_concurrent_requests=1))
    await enqueue(broker, "s1", "s2", tenant="slow", band="interactive")
    await enqueue(broker, "b1", "b2", band="batch", num_prompt_tokens=3, max_tokens=4)
    await enqueue(broker, "due", band="standard", timeout_ms=50_000)
    await take(broker, "e0", 1)
    await take(broker, "e1", 1)
    demand = await homes.demand()
    assert demand.num_waiting == {"batch": 2}
    assert demand.num_tokens > 0
    assert demand.num_running == 2
    assert demand.num_engines == 2
    assert demand.num_free_seqs == 0
    assert set(demand.oldest_age_s) == set(demand.num_waiting)


async def test_returned_requests_and_deadlines_count(broker: Broker, queue: Queue, homes: Homes) -> None:
    await enqueue(broker, "a", band="batch")
    await enqueue(broker, "b", band="standard", timeout_ms=50_000)
    for claim in await take(broker, "e0", 2):
        await broker.release([held(claim.request_id)])
    demand = await homes.demand()
    assert demand.num_returned == 2
    assert set(demand.oldest_age_s) == {"standard", "batch"}
    assert 0 < demand.deadline_in_s <= 50
    await take(broker, "e0", 2)
    await broker.finish([final("a", 2, 0, 1)])
    demand = await homes.demand()
    assert (demand.num_running, demand.num_returned, demand.deadline_in_s) == (1, 0, math.inf)
    await queue.pause(put_back=True)
    assert (await homes.demand()).is_paused


async def test_the_cheapest_home_goes_first_and_one_of_them_wakes_it(broker: Broker, homes: Homes) -> None:
    await enter(homes, "cheap", 1.0)
    await enter(homes, "dear", 5.0, DISK)
    await enqueue(broker, "a")
    later = await homes.request_grant("dear", 5.0, patience_s=1000)
    assert later.reply is GrantReply.LATER
    assert 0 < later.wait_s <= LONG_MS / 1000 + 0.001  # just past the lease of the cheap one, less than 1004 s
    assert (await homes.request_grant("dear", 5.0, patience_s=1)).wait_s == 5
    assert (await homes.request_grant("cheap", 1.0)).is_granted
    assert (await homes.request_grant("dear", 5.0)).reply is GrantReply.ELSEWHERE
    assert (await homes.request_grant("cheap", 1.0)).is_granted  # renewed while it wakes
    assert (await homes.demand()).grants == ("cheap",)
    await homes.return_grant("cheap")
    assert (await homes.request_grant("dear", 5.0, waited_s=1004.001, patience_s=1000)).is_granted


async def test_an_engine_that_claims_stands_for_its_grant(broker: Broker, homes: Homes) -> None:
    await enter(homes, "d0")
    await enter(homes, "d1")
    assert (await homes.request_grant("d0", 1.0)).is_granted
    await take(broker, "e0", 4)
    await enter(homes, "d0", level=SleepLevel.AWAKE)
    demand = await homes.demand()
    assert (demand.grants, demand.num_engines, demand.num_free_seqs) == ((), 1, 4)
    assert (await homes.request_grant("d1", 1.0)).reply is GrantReply.ELSEWHERE
    assert (await homes.request_grant("d1", 1.0, num_engines=2)).is_granted


async def test_a_model_that_has_just_woken_is_not_woken_again_before_its_engine_claims(homes: Homes) -> None:
    for device in ("d0", "d1"):
        await enter(homes, device)
    assert (await homes.request_grant("d0", 1.0)).is_granted
    await enter(homes, "d0", level=SleepLevel.AWAKE)
    assert (await homes.request_grant("d1", 1.0)).reply is GrantReply.ELSEWHERE
    demand = await homes.demand()
    assert (demand.num_engines, demand.num_engines_without("d1")) == (0, 1)


def test_requests_that_wait_long_for_full_engines_want_more_of_them() -> None:
    options = SwapOptions()

    def wanted(age_s: float, num_engines: int = 2, band: str = "interactive", num_free_seqs: int = 0) -> int:
        demand = Demand(num_engines=num_engines, num_free_seqs=num_free_seqs, oldest_age_s={band: age_s})
        return demand.num_engines_wanted(options)

    assert wanted(100.0, num_engines=0) == 1
    assert [wanted(age_s) for age_s in (0.0, 9.0, 10.0, 10.1, 30.0)] == [2, 2, 2, 3, 6]
    assert wanted(30.0, num_free_seqs=1) == 2
    assert wanted(100.0, band="batch") == 2


async def test_a_home_that_dies_while_it_wakes_gives_way(
    commands: CommandConnection, broker: Broker, homes: Homes
) -> None:
    await enter(homes, "d0")
    await enter(homes, "d1")
    await homes.request_grant("d0", 1.0)
    await commands.execute("ZADD", homes.keys.prefix + "grants", 0, "d0")
    assert (await homes.request_grant("d1", 1.0)).is_granted
    assert (await homes.demand()).grants == ("d1",)


async def test_one_of_many_homes_is_granted(homes: Homes) -> None:
    devices = [f"d{number}" for number in range(100)]
    for device in devices:
        await enter(homes, device)
    grants = await asyncio.gather(*(homes.request_grant(device, 1.0) for device in devices))
    assert sum(grant.is_granted for grant in grants) == 1


TOO_LARGE = ModelTooLargeError("m needs 41 GiB, device d0 has 36 GiB; lower max_model_len to 4096")


async def give_up(homes: Homes, device: str) -> None:
    await homes.renew(device, DISK, 1.0, error=TOO_LARGE, lease_ttl_ms=LONG_MS)


async def test_requests_end_when_every_device_has_given_the_model_up(
    broker: Broker, homes: Homes, queue: Queue
) -> None:
    await enter(homes, "d0")
    await enter(homes, "d1", level=DISK)
    await enqueue(broker, "returned", "waiting", band="batch")
    await enqueue(broker, "urgent", tenant="other", fail_fast=True)
    (claim,) = await take(broker, "e0", 1)
    await broker.release([held(claim.request_id)])
    await give_up(homes, "d0")
    ids = ("returned", "waiting", "urgent")
    assert [await broker.state(request_id) for request_id in ids] == [RequestState.QUEUED] * 3  # e0 lives
    await die(broker, "e0", external=True)
    await give_up(homes, "d0")
    assert [await broker.state(request_id) for request_id in ids] == [RequestState.QUEUED] * 3  # d1 may wake it
    await give_up(homes, "d1")
    assert [await broker.state(request_id) for request_id in ids] == [RequestState.FAILED] * 3
    stats = await queue.stats()
    assert (stats.depth, stats.readiness.state, stats.readiness.error) == (0, ModelState.BROKEN, str(TOO_LARGE))
    assert (await homes.demand()).homes[0].error == f"model_too_large {TOO_LARGE}"


async def test_a_model_that_was_given_up_refuses_requests_until_a_device_may_wake_it(
    broker: Broker, homes: Homes
) -> None:
    await homes.renew("d0", DISK, 1.0, error=ModelBrokenError("no file"), lease_ttl_ms=LONG_MS)
    with pytest.raises(ModelBrokenError, match=r"^no file$"):
        await enqueue(broker, "early")
    await enter(homes, "d1")
    await enqueue(broker, "a", fail_fast=True)
    await homes.renew("d2", DISK, 9.0, lease_ttl_ms=LONG_MS)
    assert (await homes.request_grant("d2", 9.0, patience_s=1e6)).reply is GrantReply.LATER
    await give_up(homes, "d1")
    assert (await homes.request_grant("d2", 9.0, patience_s=1e6)).is_granted  # the cheaper homes have given it up
    assert await broker.state("a") is RequestState.QUEUED
    await homes.leave("d2")
    await give_up(homes, "d1")
    assert await broker.state("a") is RequestState.FAILED
    await enter(homes, "d0", level=DISK)
    await enqueue(broker, "late", fail_fast=True)
    await homes.leave("d0")
    assert await broker.state("late") is RequestState.FAILED
    with pytest.raises(ModelTooLargeError, match="lower max_model_len to 4096"):
        await enqueue(broker, "after")


async def test_a_request_for_a_sleeping_model_starts_when_a_device_is_expected_to_wake_it(
    broker: Broker, homes: Homes, queue: Queue
) -> None:
    await enqueue(broker, "a", "b", "c")

    async def starts() -> list[float | None]:
        statuses = [await queue.status(request_id) for request_id in ("a", "b", "c")]
        return [None if one is None else one.estimated_start_s for one in statuses]

    assert await starts() == [None] * 3
    await enter(homes, "d0", 9.0, DISK)
    assert await starts() == [9.0] * 3  # without a forecast, as long as it takes to wake
    await homes.renew("d1", ASLEEP, 1.0, ready_in_s=LONG_MS / 1000, num_seqs=2, lease_ttl_ms=LONG_MS)
    assert await starts() == [9.0] * 3
    await homes.renew("d0", ASLEEP, 9.0, ready_in_s=0.0, num_seqs=2, lease_ttl_ms=LONG_MS)
    assert await starts() == [9.0] * 3  # the forecast is older than these requests
    assert (await homes.request_grant("d0", 9.0, waited_s=1e6, lease_ttl_ms=LONG_MS)).is_granted
    assert await starts() == [0.0] * 3
    status = await queue.status("a")
    assert status is not None
    assert status.readiness is not None
    assert (status.readiness.state, status.readiness.num_seqs) == (ModelState.LOADING, 2)
    assert (await queue.stats()).estimated_wait_s == 0.0


async def test_events_say_that_a_request_waits_for_its_model_and_why_it_was_returned(
    commands: CommandConnection, broker: Broker, homes: Homes
) -> None:
    history = RequestHistory(commands, broker.keys)
    await enqueue(broker, "early")
    await enter(homes, "d0")
    await enqueue(broker, "asleep")
    for claim in await take(broker, "e0", 2):
        await broker.release([held(claim.request_id)], cause="swapped for n")
    await enqueue(broker, "awake")
    causes = {name: [event.cause for event in await history.history(name)] for name in ("early", "asleep", "awake")}
    assert causes == {
        "early": ["", "", "swapped for n"],
        "asleep": ["waiting_for_wake", "", "swapped for n"],
        "awake": [""],
    }
