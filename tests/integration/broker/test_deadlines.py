"""Deadlines: what is past one ends as expired, whether it waits or runs, and says so."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from penstock.shared.broker import Broker, EngineCapacity, Entry, FinalRecord, Queue
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.supervision import CancelCommand, EngineCommand
from penstock.shared.queue.policy import Order, QueuePolicy

from .conftest import CAUSE, TTL_MS, assert_nothing_is_left, enqueue, record, take


async def server_ms(commands: CommandConnection) -> int:
    seconds, micros = await commands.execute("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


async def wait_until_due(commands: CommandConnection, broker: Broker, request_id: str) -> None:
    deadline = time.monotonic() + 60
    due_ms = float(await commands.execute("HGET", broker.keys.request(request_id), "deadline"))
    while await server_ms(commands) <= due_ms:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def make_due(commands: CommandConnection, broker: Broker, request_id: str) -> None:
    """Move the deadline of a claimed request to just before now."""
    now_ms = await server_ms(commands)
    await commands.execute("HSET", broker.keys.request(request_id), "deadline", now_ms)
    await commands.execute("ZADD", broker.keys.prefix + "deadlines", "XX", now_ms, request_id)


async def end_of(broker: Broker, request_id: str) -> Delta:
    *_, end = await broker.read_log(request_id)
    return end


@pytest.mark.parametrize("order", list(Order))
async def test_a_request_that_expires_in_the_queue_never_runs(
    broker: Broker, queue: Queue, commands, order: Order
) -> None:
    await queue.configure(QueuePolicy(order=order))
    await enqueue(broker, "a", timeout_ms=1)
    await enqueue(broker, "b", timeout_ms=600_000)
    await enqueue(broker, "c")
    await wait_until_due(commands, broker, "a")
    wave = await take(broker, "e0", 5)
    assert [claim.request_id for claim in wave] == ["b", "c"]
    assert [claim.expires_in_ms > 0 for claim in wave] == [True, False]
    assert 300_000 < wave[0].expires_in_ms <= 600_000
    assert wave[1].expires_in_ms == -1
    assert await broker.state("a") == "expired"
    end = await end_of(broker, "a")
    assert (end.index, end.token_ids, end.finish_reason, end.error) == (0, [], "expired", None)


@pytest.mark.parametrize("by", ["expire", "reap"])
async def test_it_expires_without_any_engine(broker: Broker, commands, by: str) -> None:
    await enqueue(broker, "a", timeout_ms=1)
    await enqueue(broker, "b", timeout_ms=600_000)
    await wait_until_due(commands, broker, "a")
    if by == "expire":
        assert await broker.expire() == 1
        assert await broker.expire() == 0
    else:
        await broker.reap(CAUSE, max_deliveries=3)
    assert (await broker.state("a"), await broker.state("b")) == ("expired", "queued")
    await broker.cancel("b")
    await assert_nothing_is_left(commands, broker)


async def test_a_running_request_past_its_deadline_ends_after_the_grace_and_keeps_its_tokens(
    broker: Broker, commands, subscriber: Subscriber
) -> None:
    sent: list[bytes] = []
    await subscriber.subscribe(broker.keys.engine_commands("e0"), sent.append)
    await enqueue(broker, "a", timeout_ms=600_000)
    (claim,) = await take(broker, "e0", 1)
    await broker.append([record("a", claim.epoch, 0, 7, 8)])
    await make_due(commands, broker, "a")
    # Its engine knows the deadline, and ends it with all it has; others leave it the time to.
    assert await broker.expire(grace_ms=600_000) == 0
    assert await broker.append([record("a", claim.epoch, 2, 9)]) == []
    assert await broker.expire(grace_ms=0) == 1
    assert await broker.state("a") == "expired"
    assert [delta.token_ids for delta in await broker.read_log("a")] == [[7, 8], [9], []]
    end = await end_of(broker, "a")
    assert (end.index, end.finish_reason) == (3, "expired")
    assert await broker.append([record("a", claim.epoch, 3, 10)]) == ["a"]
    assert await broker.claims("e0") == []
    await subscriber.subscribe(broker.keys.output("barrier"), lambda _: None)
    assert [msgspec.msgpack.decode(command, type=EngineCommand) for command in sent] == [CancelCommand("a")]
    await assert_nothing_is_left(commands, broker)


async def test_a_reaper_ends_requests_running_a_second_past_their_deadline(broker: Broker, commands) -> None:
    await enqueue(broker, "a", "b", timeout_ms=600_000)
    assert len(await take(broker, "e0", 2)) == 2
    deadlines, now_ms = broker.keys.prefix + "deadlines", await server_ms(commands)
    await commands.execute("ZADD", deadlines, now_ms - 1001, "a", now_ms, "b")
    await broker.reap(CAUSE, max_deliveries=3)
    # Unless the look came so late that a second had passed for both.
    in_grace = "claimed" if await server_ms(commands) - now_ms < 1000 else "expired"
    assert await broker.state("a") == "expired"
    assert await broker.state("b") in ("claimed", in_grace)


@pytest.mark.parametrize("put_back", ["release", "death"])
async def test_a_requeued_request_expires_immediately(broker: Broker, commands, put_back: str) -> None:
    await enqueue(broker, "a", timeout_ms=600_000)
    (claim,) = await take(broker, "e0", 1)
    await broker.append([record("a", claim.epoch, 0, 7)])
    if put_back == "release":
        await broker.release([("a", claim.epoch)])
    else:
        await broker.reclaim("e0", CAUSE, is_external=False, max_deliveries=3)
    await make_due(commands, broker, "a")
    assert await take(broker, "e1", 5) == []
    assert await broker.state("a") == "expired"
    assert [delta.token_ids for delta in await broker.read_log("a")] == [[7], []]
    await assert_nothing_is_left(commands, broker)


async def test_of_a_deadline_and_a_timeout_the_earlier_holds(broker: Broker, queue: Queue, commands) -> None:
    now_ms = await server_ms(commands)
    both = {"sooner": (now_ms + 60_000, 600_000), "later": (now_ms + 600_000, 60_000)}
    for request_id, (deadline_ms, timeout_ms) in both.items():
        await enqueue(broker, request_id, deadline_ms=deadline_ms, timeout_ms=timeout_ms)
        status = await queue.status(request_id)
        assert status is not None
        assert status.deadline is not None
        assert 59.9 < status.deadline - now_ms / 1000 < 120
    await enqueue(broker, "past", deadline_ms=now_ms - 1, timeout_ms=600_000)
    await enqueue(broker, "at_once", timeout_ms=0)
    assert {claim.request_id for claim in await take(broker, "e0", 5)} == {"sooner", "later"}
    assert (await broker.state("past"), await broker.state("at_once")) == ("expired", "expired")


async def test_however_many_expire_at_once_none_of_them_runs(broker: Broker, commands) -> None:
    """A claim checks a hundred deadlines at most, and the first hundred belong to running requests."""
    entries = [
        Entry(request_id=f"r{i}", payload=b"p", result_ttl_ms=TTL_MS, timeout_ms=600_000, tenant=f"t{i % 3}")
        for i in range(400)
    ]
    assert set(await broker.enqueue_many(entries)) == {"new"}
    running = await take(broker, "e0", 150)
    assert await broker.release([(running[0].request_id, running[0].epoch)]) == 1
    for entry in entries:
        await commands.execute("HSET", broker.keys.request(entry.request_id), "deadline", 1)
        await commands.execute("ZADD", broker.keys.prefix + "deadlines", 1, entry.request_id)
    # Those that run come first among equal deadlines.
    for claim in running[1:]:
        await commands.execute("ZADD", broker.keys.prefix + "deadlines", 0, claim.request_id)
    await enqueue(broker, "alive")
    started: list[str] = []
    for _ in range(5):
        started += [claim.request_id for claim in await take(broker, "e1", 100)]
    assert started == ["alive"]
    assert await broker.expire(grace_ms=2**50) == 0
    assert await broker.expire(grace_ms=0) == len(running) - 1
    await broker.cancel("alive")
    await assert_nothing_is_left(commands, broker)


async def test_a_request_that_ends_in_time_leaves_no_deadline(broker: Broker, commands) -> None:
    await enqueue(broker, *"abcd", timeout_ms=600_000)
    wave = await take(broker, "e0", 2)
    await broker.cancel("a")
    assert await broker.park(wave[1], CAUSE, "validation_error", "unreadable")
    await broker.cancel("c")
    await broker.cancel("d")
    assert await broker.expire() == 0
    await assert_nothing_is_left(commands, broker)


async def test_a_claim_that_checked_only_a_part_asks_for_another_claim(broker: Broker) -> None:
    """The claim checks a limited number of expired requests, so another one must follow immediately."""
    entries = [Entry(request_id=f"late{n}", payload=b"p", result_ttl_ms=1000, deadline_ms=1) for n in range(320)]
    await broker.enqueue_many([*entries, Entry(request_id="a", payload=b"p", result_ttl_ms=1000)])
    first, second = [await broker.claim("e0", EngineCapacity(max_num_seqs=1)) for _ in range(2)]
    assert (first.claims, first.retry_ms) == ([], 0)
    assert ([claim.request_id for claim in second.claims], second.retry_ms) == (["a"], -1)


async def test_the_owner_of_an_expired_request_is_notified(broker: Broker, commands: CommandConnection) -> None:
    """Applies also if the owner ends the request as expired, because its last tokens were not written."""
    await enqueue(broker, "a", timeout_ms=600_000)
    (claim,) = await take(broker, "e0", 1)
    await commands.execute("ZADD", broker.keys.prefix + "deadlines", 0, "a")
    assert await broker.expire() == 1
    late = Delta(index=0, token_ids=[7], finish_reason=FinishReason.EXPIRED)
    assert await broker.finish([FinalRecord("a", claim.epoch, late)]) == ["a"]
