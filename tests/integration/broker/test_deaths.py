"""What the broker does with the requests of engines and clients that die, one change of state at a time."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from penstock.shared.broker import UNSERVED, Broker, DeadLetter
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.deployment.records import DeathCause

from ...processes import DEADLINE_S
from .conftest import CAUSE, TTL_MS, die, enqueue, final, held, record, take

LEASE_MS = 300


async def reap_until(broker: Broker, condition) -> list:
    """Look as a supervisor does until ``condition`` holds; returns everything that was found."""
    found = []
    deadline = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < deadline
        found += await broker.reap(CAUSE, max_deliveries=3, lease_ttl_ms=LEASE_MS)
        await asyncio.sleep(0.02)
    return found


async def test_requests_of_a_dead_engine_resume_on_another_engine(broker: Broker) -> None:
    await enqueue(broker, "a", "b")
    await take(broker, "e0", 2)
    await broker.append([record("a", 1, 0, 7), record("b", 1, 0, 8)])
    assert await die(broker, "e0", external=True) == (2, 0)
    assert await die(broker, "e0", external=True) == (0, 0)
    claims = await take(broker, "e1", 5)
    assert {(c.request_id, c.attempt, c.num_logged_tokens, c.alone_until) for c in claims} == {
        ("a", 2, 1, -1),
        ("b", 2, 1, -1),
    }
    assert await broker.append([record("a", 1, 1, 9)]) == ["a"]
    assert await broker.finish([final("a", 2, 1, 9)]) == []


async def test_only_one_of_many_reapers_takes_an_expired_engines_claims(broker: Broker) -> None:
    await enqueue(broker, *[f"r{i}" for i in range(20)])
    await take(broker, "e0", 20, lease_ttl_ms=1)

    async def moved() -> bool:
        return not await broker.claims("e0")

    found = await asyncio.gather(*(reap_until(broker, moved) for _ in range(4)))
    (reaped,) = [one for each in found for one in each]
    assert (reaped.kind, reaped.name, reaped.num_requests, reaped.num_parked) == ("engine", "e0", 20, 0)
    assert len(await take(broker, "e1", 30)) == 20


async def test_a_lease_that_is_renewed_is_not_reaped(broker: Broker) -> None:
    await enqueue(broker, "a", "b")
    await take(broker, "e0", 1, lease_ttl_ms=1)
    await take(broker, "e1", 1, lease_ttl_ms=1)
    # For longer than the test takes, so that it is this one renewal that counts.
    assert await broker.renew("e1", [held("b", 1)], lease_ttl_ms=600_000) == []

    async def other_is_gone() -> bool:
        return not await broker.claims("e0")

    found = await reap_until(broker, other_is_gone)
    assert [one.name for one in found] == ["e0"]
    assert await broker.claims("e1") == [held("b", 1)]


async def test_time_without_reaper_checks_does_not_expire_leases(broker: Broker, commands) -> None:
    """Leases expire during a restart or suspension of Redis although their engines live."""
    long_ms = 600_000
    await broker.reap(CAUSE, max_deliveries=3, lease_ttl_ms=0)
    await enqueue(broker, "a")
    await take(broker, "e0", 1)
    await commands.execute("ZADD", broker.keys.leases, 0, "e0")
    await commands.execute("HSET", broker.keys.prefix + "reaper", "looked_at", 0)
    for _ in range(3):
        assert await broker.reap(CAUSE, max_deliveries=3, lease_ttl_ms=long_ms) == []
    assert await broker.renew("e0", [held("a", 1)]) == []


async def test_the_renewal_of_a_stale_claim_is_refused(broker: Broker) -> None:
    await enqueue(broker, "a", "b", "c")
    await take(broker, "e0", 3)
    await die(broker, "e0", external=True)
    await take(broker, "e1", 1)
    await broker.cancel("c")
    assert await broker.renew("e0", [held("a", 1), held("b", 1), held("c", 1)]) == ["a", "b", "c"]
    assert await broker.renew("e1", [held("a", 2)]) == []


async def test_a_request_that_kills_each_engine_is_parked_and_the_others_are_not(
    broker: Broker, commands, subscriber: Subscriber
) -> None:
    await enqueue(broker, "poison", "b", "c")
    await take(broker, "e0", 3)
    assert await die(broker, "e0", external=False) == (3, 0)
    num_deaths = 1
    ended: list[str] = []
    while True:
        wave = await take(broker, "e1", 5)
        if not wave:
            break
        (claim,) = wave
        assert claim.alone_until > 0
        if claim.request_id == "poison":
            _, num_parked = await die(broker, "e1", external=False)
            num_deaths += 1
            assert num_deaths <= 3, "it is never parked"
            ended += ["poison"] * num_parked
        else:
            assert await broker.finish([final(claim.request_id, claim.epoch, 0, 5)]) == []
            ended.append(claim.request_id)
    assert num_deaths == 3
    assert sorted(ended) == ["b", "c", "poison"]
    *_, end = await broker.read_log("poison")
    assert end.error is not None
    assert (end.finish_reason, end.error.code) == ("poisoned", "poison_request")
    assert await broker.state("poison") == "parked"
    (dead,) = await DeadLetter(commands, broker.keys).list()
    assert (dead.request_id, dead.payload, dead.deliveries, dead.deaths, dead.cause) == (
        "poison",
        b"payload",
        3,
        3,
        msgspec.structs.replace(CAUSE, engine_id="e1"),
    )


async def test_an_external_kill_makes_no_request_a_suspect(broker: Broker) -> None:
    """kill -9 of one engine after the other, with progress in between, parks nothing."""
    await enqueue(broker, "a")
    for death in range(6):
        (claim,) = await take(broker, f"e{death}", 1)
        assert claim.alone_until == -1
        assert await broker.append([record("a", claim.epoch, claim.num_logged_tokens, 7)]) == []
        assert await die(broker, f"e{death}", external=True) == (1, 0)


async def test_a_request_that_gets_its_engine_killed_before_its_first_token_is_parked_too(broker: Broker) -> None:
    await enqueue(broker, "a", "b")
    for death in range(2):
        assert len(await take(broker, f"e{death}", 2)) == 2
        assert await die(broker, f"e{death}", external=True) == (2, 0)
    (first,) = await take(broker, "e2", 2)
    assert first.alone_until > 0
    assert await die(broker, "e2", external=True) == (0, 1)


async def test_a_suspect_that_passes_the_point_of_its_death_is_cleared(broker: Broker) -> None:
    await enqueue(broker, "a")
    for death in range(5):
        (claim,) = await take(broker, f"e{death}", 1)
        index = claim.num_logged_tokens
        tokens = max(claim.alone_until, 8) - index
        await broker.append([record("a", claim.epoch, index, *range(tokens))])
        assert await die(broker, f"e{death}", external=False) == (1, 0)


async def test_an_engine_that_holds_something_gets_no_suspect_until_it_is_the_ward(broker: Broker, commands) -> None:
    await enqueue(broker, "suspect", "other")
    await take(broker, "e0", 1)
    await die(broker, "e0", external=False)
    assert [claim.request_id for claim in await take(broker, "e1", 5, num_held=2)] == ["other"]
    await enqueue(broker, "more")
    await commands.execute("HSET", broker.keys.request("suspect"), "suspected_at", 0)
    assert await take(broker, "e1", 5, num_held=1) == []
    assert [claim.request_id for claim in await take(broker, "e2", 5, num_held=1)] == ["more"]
    assert [claim.request_id for claim in await take(broker, "e1", 5, num_held=0)] == ["suspect"]


async def test_a_cancelled_suspect_stands_in_nobodys_way(broker: Broker, commands) -> None:
    await enqueue(broker, "suspect")
    await take(broker, "e0", 1)
    await die(broker, "e0", external=False)
    await broker.cancel("suspect")
    await enqueue(broker, "a")
    assert [claim.request_id for claim in await take(broker, "e1", 5, num_held=1)] == ["a"]


async def test_park_and_replay(broker: Broker, commands) -> None:
    await enqueue(broker, "a")
    (claim,) = await take(broker, "e0", 1)
    assert await broker.park(claim, CAUSE, "validation_error", "unreadable")
    assert not await broker.park(claim, CAUSE, "validation_error", "unreadable")
    (end,) = await broker.read_log("a")
    assert end.error is not None
    assert (end.finish_reason, end.error.message) == ("error", "unreadable")
    dead_letter = DeadLetter(commands, broker.keys)
    assert await dead_letter.replay("a")
    assert not await dead_letter.replay("a")
    assert await dead_letter.list() == []
    assert await broker.append([record("a", claim.epoch, 0, 1)]) == ["a"]
    (again,) = await take(broker, "e1", 1)
    assert (again.payload, again.num_logged_tokens, again.attempt) == (b"payload", 0, 1)
    assert await broker.append([record("a", claim.epoch, 0, 1)]) == ["a"]
    assert await broker.finish([final("a", again.epoch, 0, 1)]) == []
    assert [delta.token_ids for delta in await broker.read_log("a")] == [[1]]


async def test_a_vanished_clients_requests_are_cancelled_but_not_detached_ones(broker: Broker) -> None:
    for request_id, client in (("interactive", "c0"), ("detached", "")):
        await broker.enqueue(request_id, b"p", result_ttl_ms=TTL_MS, client_id=client, client_ttl_ms=1)

    async def cancelled() -> bool:
        return await broker.state("interactive") == "cancelled"

    found = await reap_until(broker, cancelled)
    assert [(one.kind, one.name, one.num_requests) for one in found] == [("client", "c0", 1)]
    assert await broker.state("detached") == "queued"


@pytest.mark.slow
async def test_a_client_that_still_listens_has_not_vanished(broker: Broker, subscriber: Subscriber) -> None:
    await broker.enqueue("a", b"p", result_ttl_ms=TTL_MS, client_id="c0", client_ttl_ms=1)
    subscription = await subscriber.subscribe(broker.keys.output("a"), lambda _: None)
    looks = 0

    async def looked_enough() -> bool:
        nonlocal looks
        looks += 1
        return looks > 50

    assert await reap_until(broker, looked_enough) == []
    subscriber.unsubscribe(subscription)

    async def cancelled() -> bool:
        return await broker.state("a") == "cancelled"

    await reap_until(broker, cancelled)


async def test_fail_fast_requests_do_not_wait_for_an_engine(broker: Broker) -> None:
    def enqueue_fast(request_id: str):
        return broker.enqueue(request_id, b"p", result_ttl_ms=TTL_MS, fail_fast=True)

    assert await enqueue_fast("a") == UNSERVED
    assert await broker.state("a") is None
    await broker.renew("e0", [])
    await broker.renew("e1", [])
    assert await enqueue_fast("a") == "new"
    await enqueue(broker, "patient")
    await die(broker, "e0", external=True)
    assert await broker.state("a") == "queued"
    await die(broker, "e1", external=True)
    (end,) = await broker.read_log("a")
    assert end.error is not None
    assert (end.finish_reason, end.error.code) == ("engine_lost", "engine_dead")
    assert await broker.state("patient") == "queued"


async def test_an_enqueue_that_is_sent_again_is_still_new(broker: Broker) -> None:
    for call, expected in (("x", "new"), ("x", "new"), ("y", "queued"), ("", "queued")):
        assert await broker.enqueue("a", b"p", result_ttl_ms=TTL_MS, call=call) == expected
    assert len(await take(broker, "e0", 5)) == 1


@pytest.mark.parametrize("trace", ["", "x" * 100_000])
async def test_the_cause_is_kept_whatever_its_size(broker: Broker, commands, trace: str) -> None:
    await enqueue(broker, "a")
    (claim,) = await take(broker, "e0", 1)
    cause = DeathCause(engine_id="e0", reason="é", trace=trace)
    await broker.park(claim, cause, "validation_error", "é")
    dead = await DeadLetter(commands, broker.keys).show("a")
    assert dead is not None
    assert dead.cause == cause


async def test_deaths_while_sharing_an_engine_park_no_request(broker: Broker) -> None:
    """Three deaths occur, but none is certainly caused by this request."""
    for death in range(4):
        other = f"other{death}"
        await enqueue(broker, other, *(["a"] if death == 0 else []))
        claimed = {c.request_id for c in await take(broker, f"e{death}", 1)}
        claimed |= {c.request_id for c in await take(broker, f"e{death}", 5, num_held=0)}
        assert "a" in claimed
        assert len(claimed) > 1
        assert (await die(broker, f"e{death}", external=False))[1] == 0


async def test_a_claim_that_another_engine_has_is_left_alone(broker: Broker, commands: CommandConnection) -> None:
    """A foreign writer has restored the old claim in the set of the first engine."""
    await enqueue(broker, "a")
    (old,) = await take(broker, "e0", 1)
    assert await broker.release([("a", old.epoch)]) == 1
    (new,) = await take(broker, "e1", 1)
    await commands.execute("HSET", broker.keys.claims("e0"), "a", old.epoch)
    assert await die(broker, "e0", external=True) == (0, 0)
    assert await broker.append([record("a", new.epoch, 0, 7)]) == []
