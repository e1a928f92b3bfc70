"""Tokens are shared by weight among the tenants of a band, whatever their requests are like."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass

import pytest

from penstock.shared.broker import Broker, Entry, FinalRecord, Queue
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.queue.policy import Order, QueuePolicy, TenantPolicy

from ..conftest import TTL_MS, enqueue, finish_with, take
from ..snapshot import read_snapshot

NUM_CLAIMS = 1000
BACKLOG = 16


@dataclass
class Tenant:
    """Asks for requests of its own kind, and never for fewer than wait already."""

    name: str
    weight: float
    max_prompt: int
    max_output: int

    def entry(self, rng: random.Random, number: int) -> Entry:
        return Entry(
            request_id=f"{self.name}-{number}",
            payload=b"p",
            result_ttl_ms=TTL_MS,
            tenant=self.name,
            num_prompt_tokens=rng.randint(1, self.max_prompt),
            max_tokens=rng.randint(1, self.max_output),
        )


async def serve(broker: Broker, rng: random.Random, tenants: list[Tenant], num_claims: int) -> Counter[str]:
    """Run so many requests, all tenants always having more; returns the tokens that each tenant was given."""
    by_name = {tenant.name: tenant for tenant in tenants}
    numbers, entries, given = itertools.count(), {}, Counter[str]()

    async def ask(names: list[str]) -> None:
        new = [by_name[name].entry(rng, next(numbers)) for name in names]
        entries.update({entry.request_id: entry for entry in new})
        assert set(await broker.enqueue_many(new)) == {"new"}

    await ask([name for name in by_name for _ in range(BACKLOG)])
    while num_claims > 0:
        wave = await take(broker, "e0", rng.randint(1, 8))
        num_claims -= len(wave)
        ends: list[FinalRecord] = []
        for claim in wave:
            entry = entries.pop(claim.request_id)
            # The client's estimate of a prompt is off, and most outputs end before their limit.
            num_prompt = entry.num_prompt_tokens + rng.randint(0, 3)
            num_output = rng.randint(1, entry.max_tokens)
            given[entry.tenant] += num_prompt + num_output
            usage = Usage(num_prompt_tokens=num_prompt, num_output_tokens=num_output)
            delta = Delta(token_ids=[0] * num_output, finish_reason=FinishReason.STOP, usage=usage)
            ends.append(FinalRecord(claim.request_id, claim.epoch, delta))
        assert await broker.finish(ends) == []
        await ask([claim.request_id.partition("-")[0] for claim in wave])
    return given


@pytest.mark.parametrize(("weights", "seed"), [((1, 1, 1), 0), ((1, 2, 4), 1), ((0.5, 1.5, 3), 2), ((10, 30), 3)])
async def test_shares_follow_weights(broker: Broker, queue: Queue, weights: tuple[float, ...], seed: int) -> None:
    rng = random.Random(seed)
    tenants: list[Tenant] = []
    for number, weight in enumerate(weights):
        tenants.append(Tenant(f"t{number}", weight, rng.randint(1, 300), rng.randint(1, 200)))
        await queue.configure_tenant(f"t{number}", TenantPolicy(weight=weight))
    given = await serve(broker, rng, tenants, NUM_CLAIMS)
    for tenant in tenants:
        share = given[tenant.name] / given.total()
        assert share == pytest.approx(tenant.weight / sum(weights), rel=0.05), given


async def test_an_idle_tenant_saves_nothing_up(broker: Broker) -> None:
    await enqueue(broker, *[f"a{i}" for i in range(100)], tenant="a", max_tokens=100)
    assert len(await take(broker, "e0", 60)) == 60
    await enqueue(broker, *[f"b{i}" for i in range(100)], tenant="b", max_tokens=100)
    turns = Counter(claim.request_id[0] for claim in await take(broker, "e0", 20))
    assert abs(turns["a"] - turns["b"]) <= 1


async def test_a_returning_tenant_resumes_at_the_service_level_of_the_others(broker: Broker) -> None:
    await enqueue(broker, *[f"a{i}" for i in range(100)], tenant="a", max_tokens=100)
    await enqueue(broker, *[f"b{i}" for i in range(10)], tenant="b", max_tokens=100)
    assert len(await take(broker, "e0", 60)) == 60
    await enqueue(broker, *[f"c{i}" for i in range(100)], tenant="b", max_tokens=100)
    turns = Counter(claim.request_id[0] for claim in await take(broker, "e0", 20))
    assert abs(turns["a"] - turns["c"]) <= 1


async def test_a_waiting_tenant_is_served_before_tenants_that_arrive_later(broker: Broker) -> None:
    """Each tenant sends one request, like users of an app; the order of names does not matter."""
    await enqueue(broker, "z", tenant="z", max_tokens=100)
    await enqueue(broker, *"abcd", max_tokens=100)
    started: list[str] = []
    for number in range(20):
        (claim,) = await take(broker, "e0", 1)
        started.append(claim.request_id)
        await finish_with(broker, claim, num_output=50)
        await enqueue(broker, f"a{number}", tenant=f"a{number:03}", max_tokens=100)
    assert "z" in started[:6]


async def test_newcomers_do_not_starve_a_tenant_with_a_backlog(broker: Broker, commands) -> None:
    """Five tenants with one request each wait at any time, always others: a sixth gets the sixth part."""
    await enqueue(broker, *[f"z{i}" for i in range(60)], tenant="z", max_tokens=100)
    for number in range(5):
        await enqueue(broker, f"a{number}", tenant=f"a{number:03}", max_tokens=100)
    num_turns = 0
    for number in range(5, 245):
        (claim,) = await take(broker, "e0", 1)
        await finish_with(broker, claim, num_output=50)
        if claim.request_id.startswith("z"):
            num_turns += 1
        else:
            await enqueue(broker, f"a{number}", tenant=f"a{number:03}", max_tokens=100)
    assert num_turns == pytest.approx(40, abs=2)
    # Nor is anything kept for those that have gone.
    assert len((await read_snapshot(commands, broker.keys)).of("idle").get("standard", {})) < 10


async def test_estimates_that_are_too_high_do_not_hold_up_newcomers(broker: Broker) -> None:
    """Delay is at most one request, although every prompt is a tenth of its client's estimate."""
    for tenant in "ab":
        await enqueue(broker, *[f"{tenant}{i}" for i in range(120)], tenant=tenant, num_prompt_tokens=100)
    usage = Usage(num_prompt_tokens=10)

    async def next_turn() -> str:
        (claim,) = await take(broker, "e0", 1)
        delta = Delta(finish_reason=FinishReason.STOP, usage=usage)
        assert await broker.finish([FinalRecord(claim.request_id, claim.epoch, delta)]) == []
        return claim.request_id[0]

    for _ in range(120):
        await next_turn()
    await enqueue(broker, *[f"c{i}" for i in range(30)], tenant="c", num_prompt_tokens=100)
    # The others get what one request was reckoned at, 100 tokens each, and from then on all the same.
    turns = [await next_turn() for _ in range(60)]
    assert "c" in turns[:24]
    assert turns[24:].count("c") == pytest.approx(12, abs=1)


async def test_a_short_output_is_credited(broker: Broker) -> None:
    for tenant in "ab":
        await enqueue(broker, *[f"{tenant}{i}" for i in range(60)], tenant=tenant, num_prompt_tokens=1, max_tokens=100)
    first, second = sorted(await take(broker, "e0", 2), key=lambda claim: claim.request_id)
    assert (first.request_id, second.request_id) == ("a0", "b0")
    # Charged 101 each; what ends after one token has cost 2, and so much is expected of the next ones.
    await finish_with(broker, first, num_output=1)
    turns = [claim.request_id[0] for claim in await take(broker, "e0", 60)]
    assert set(turns[:48]) == {"a"}
    assert turns[52] == "b"


async def test_a_long_output_is_charged(broker: Broker) -> None:
    """Three short outputs lower the expectation; the excess of a long one is compensated to the other tenants."""
    await enqueue(broker, "x0", "x1", "x2", tenant="x", max_tokens=100)
    for claim in await take(broker, "e0", 3):
        await finish_with(broker, claim, num_output=1)
    for tenant in "ab":
        await enqueue(broker, *[f"{tenant}{i}" for i in range(60)], tenant=tenant, num_prompt_tokens=1, max_tokens=100)
    first, _ = sorted(await take(broker, "e0", 2), key=lambda claim: claim.request_id)
    await finish_with(broker, first, num_output=90)
    turns = [claim.request_id[0] for claim in await take(broker, "e0", 20)]
    assert set(turns) == {"b"}


@pytest.mark.parametrize("seed", range(3))
async def test_a_tenants_requests_start_in_the_order_of_their_arrival(broker: Broker, seed: int) -> None:
    rng = random.Random(seed)
    arrived: dict[str, list[str]] = {"a": [], "b": [], "c": []}
    for number in range(60):
        tenant = rng.choice("abc")
        arrived[tenant].append(f"{tenant}{number}")
        await enqueue(broker, f"{tenant}{number}", tenant=tenant, max_tokens=rng.randint(1, 100))
    started: dict[str, list[str]] = {"a": [], "b": [], "c": []}
    while wave := await take(broker, "e0", rng.randint(1, 5)):
        for claim in wave:
            started[claim.request_id[0]].append(claim.request_id)
    assert started == arrived


async def test_deadline_order_serves_the_earliest_first_and_requests_without_deadline_last(
    broker: Broker, queue: Queue
) -> None:
    await queue.configure(QueuePolicy(order=Order.EDF))
    timeouts = {"none0": None, "late": 900_000, "early": 300_000, "none1": None, "middle": 600_000}
    for request_id, timeout_ms in timeouts.items():
        await enqueue(broker, request_id, timeout_ms=timeout_ms)
    first = await take(broker, "e0", 1)
    await enqueue(broker, "earliest", timeout_ms=200_000)
    started = [claim.request_id for claim in [*first, *await take(broker, "e0", 9)]]
    assert started == ["early", "earliest", "middle", "late", "none0", "none1"]


async def test_without_that_order_a_deadline_gives_no_precedence(broker: Broker) -> None:
    await enqueue(broker, "first", timeout_ms=900_000)
    await enqueue(broker, "second", timeout_ms=300_000)
    assert [claim.request_id for claim in await take(broker, "e0", 2)] == ["first", "second"]
