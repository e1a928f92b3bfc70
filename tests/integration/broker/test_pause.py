"""A queue that is paused, restarted or emptied: nothing of it is lost, and nothing of it runs by mistake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from penstock.shared.broker import Broker, DeadLetter, Queue
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.errors import ValidationError
from penstock.shared.keys import Keys
from penstock.shared.messages.supervision import CancelCommand, EngineCommand
from penstock.shared.queue.policy import Order, QueuePolicy, TenantPolicy
from penstock.shared.redis_access.embedded import EmbeddedRedis

from .conftest import CAUSE, assert_nothing_is_left, enqueue, final, finish_with, record, served_per_s, take
from .snapshot import read_snapshot


async def test_a_paused_queue_assigns_no_requests(broker: Broker, queue: Queue, subscriber: Subscriber) -> None:
    wakes: list[bytes] = []
    await subscriber.subscribe(broker.keys.wake, wakes.append)
    await enqueue(broker, "a")
    assert await queue.pause(put_back=False) == 0
    assert await queue.is_paused()
    await enqueue(broker, "b")
    assert await take(broker, "e0", 5) == []
    stats = await queue.stats()
    assert (stats.is_paused, stats.depth) == (True, 2)
    # The engine is alive all the same.
    assert await broker.enqueue("fast", b"p", result_ttl_ms=60_000, fail_fast=True) == "new"
    await subscriber.subscribe(broker.keys.output("barrier"), lambda _: None)
    num_wakes = len(wakes)
    assert await queue.resume()
    await subscriber.subscribe(broker.keys.output("next barrier"), lambda _: None)
    assert len(wakes) == num_wakes + 1
    assert [claim.request_id for claim in await take(broker, "e0", 5)] == ["a", "b", "fast"]
    assert not await queue.resume()
    assert not await queue.is_paused()


async def test_running_requests_may_end_during_a_pause(broker: Broker, queue: Queue, commands) -> None:
    await enqueue(broker, "a", "b")
    first, second = await take(broker, "e0", 2)
    assert await queue.pause(put_back=False) == 2
    since = (await queue.stats()).paused_at
    assert await queue.pause(put_back=False) == 2
    assert (await queue.stats()).paused_at == since
    await finish_with(broker, first, num_output=3)
    assert await broker.append([record("b", second.epoch, 0, 1)]) == []
    assert await broker.cancel("b") == "cancelled"
    await queue.resume()
    await assert_nothing_is_left(commands, broker)


async def test_running_requests_may_be_requeued_and_resume_after_their_last_token(
    broker: Broker, queue: Queue, subscriber: Subscriber
) -> None:
    sent: dict[str, list[bytes]] = {"e0": [], "e1": []}
    for engine_id, commands in sent.items():
        await subscriber.subscribe(broker.keys.engine_commands(engine_id), commands.append)
    await enqueue(broker, "a")
    (a,) = await take(broker, "e0", 1)
    await enqueue(broker, "b")
    (b,) = await take(broker, "e1", 1)
    assert await broker.append([record("a", a.epoch, 0, 7, 8)]) == []
    assert await queue.pause(put_back=True) == 2
    assert await queue.pause(put_back=True) == 0
    await subscriber.subscribe(broker.keys.output("barrier"), lambda _: None)
    told = {e: [msgspec.msgpack.decode(c, type=EngineCommand) for c in commands] for e, commands in sent.items()}
    assert told == {"e0": [CancelCommand("a")], "e1": [CancelCommand("b")]}
    assert await broker.append([record("a", a.epoch, 2, 9)]) == ["a"]
    assert await broker.renew("e1", [("b", b.epoch)]) == ["b"]
    stats = await queue.stats()
    assert (stats.depth, stats.num_running, stats.num_returned) == (2, 0, 2)
    assert await take(broker, "e0", 5) == []
    await queue.resume()
    again = {claim.request_id: claim for claim in await take(broker, "e0", 5)}
    assert (again["a"].num_logged_tokens, again["b"].num_logged_tokens) == (2, 0)
    assert await broker.finish([final("a", again["a"].epoch, 2, 9)]) == []
    assert [delta.token_ids for delta in await broker.read_log("a")] == [[7, 8], [9]]


async def test_the_time_of_a_pause_is_not_slow_service(broker: Broker, queue: Queue, commands) -> None:
    await enqueue(broker, "a", num_prompt_tokens=10, max_tokens=10)
    await take(broker, "e0", 1)
    await queue.pause(put_back=True)
    queue_key = broker.keys.prefix + "queue"
    await commands.execute("HINCRBY", queue_key, "rate_at", -3_600_000)
    await queue.resume()
    (claim,) = await take(broker, "e0", 1)
    await commands.execute("HINCRBY", queue_key, "rate_at", -50_000)
    await finish_with(broker, claim, num_output=1)
    assert await served_per_s(commands, broker) == pytest.approx(1 / 50, rel=0.2)


async def test_a_paused_queue_still_ends_expired_requests(broker: Broker, queue: Queue) -> None:
    await queue.pause(put_back=False)
    await enqueue(broker, "a", timeout_ms=0)
    assert await broker.expire() == 1
    assert await broker.state("a") == "expired"


@asynccontextmanager
async def redis_of(folder: Path) -> AsyncIterator[CommandConnection]:
    """A server that keeps its data in ``folder``; it ends with the block."""
    redis = await asyncio.to_thread(EmbeddedRedis.start, folder)
    connection = CommandConnection(redis.url)
    try:
        yield connection
    finally:
        await connection.close()
        await asyncio.to_thread(redis.close)


async def test_all_of_a_queue_outlives_a_restart_of_redis(tmp_path: Path, namespace: str) -> None:
    """Covers lanes, turns, counts, quotas, policies, deadlines, running and parked requests."""
    keys = Keys(namespace).model("m")
    async with redis_of(tmp_path / "data") as connection:
        broker, queue = Broker(connection, keys), Queue(connection, keys)
        await queue.configure(QueuePolicy(order=Order.EDF, ageing_s=7.0))
        await queue.configure_tenant("t", TenantPolicy(weight=2.5, requests_per_minute=3))
        for number in range(6):
            options = {"band": "batch", "timeout_ms": 600_000 - number}
            await enqueue(broker, f"t{number}", tenant="t", num_prompt_tokens=10, max_tokens=10, **options)
            await enqueue(broker, f"u{number}", tenant="u", num_prompt_tokens=10, max_tokens=10)
        wave = await take(broker, "e0", 12, lease_ttl_ms=600_000)
        assert [claim.request_id[0] for claim in wave] == ["u"] * 6 + ["t"] * 3
        await enqueue(broker, "u6", "u7", tenant="u", num_prompt_tokens=10, max_tokens=10)
        await finish_with(broker, wave[0], num_output=4)
        assert await broker.park(wave[1], CAUSE, "validation_error", "unreadable")
        await broker.release([(wave[8].request_id, wave[8].epoch)])
        await queue.pause(put_back=False)
        before = await read_snapshot(connection, keys)
    async with redis_of(tmp_path / "data") as connection:
        broker, queue = Broker(connection, keys), Queue(connection, keys)
        after = await read_snapshot(connection, keys)
        assert after.kinds == before.kinds
        assert {"lane", "due", "ready", "idle", "blocked", "usage", "payload", "parked", "returned"} <= after.kinds
        for kind in after.kinds:
            assert after.of(kind) == before.of(kind)
        assert await queue.is_paused()
        assert await take(broker, "e1", 9) == []
        await queue.resume()
        assert [claim.request_id for claim in await take(broker, "e1", 9)] == [wave[8].request_id, "u6", "u7"]


@pytest.mark.parametrize("band", ["", "batch"])
async def test_purge_cancels_waiting_requests_of_a_tenant(broker: Broker, queue: Queue, band: str) -> None:
    await enqueue(broker, "running", "back", tenant="t", band="interactive")
    for claim in await take(broker, "e0", 2):
        if claim.request_id == "back":
            await broker.release([(claim.request_id, claim.epoch)])
    for number in range(3):
        for tenant in "tu":
            for name in ("standard", "batch"):
                await enqueue(broker, f"{tenant}-{name}-{number}", tenant=tenant, band=name)
    assert await queue.purge("t", band) == (3 if band else 6)
    assert await queue.purge("t", band) == 0
    assert await queue.purge("nobody") == 0
    states = {name: await broker.state(f"t-{name}-0") for name in ("standard", "batch")}
    assert states == {"standard": "queued" if band else "cancelled", "batch": "cancelled"}
    assert await broker.state("u-batch-0") == "queued"
    # What was claimed once is not the queue's to throw away.
    assert (await broker.state("running"), await broker.state("back")) == ("claimed", "queued")
    (end,) = await broker.read_log("t-batch-2")
    assert end.finish_reason == "cancelled"


async def test_purge_takes_more_than_fits_into_one_call(broker: Broker, queue: Queue, commands) -> None:
    await enqueue(broker, *[f"r{i}" for i in range(1100)])
    assert await queue.purge("default") == 1100
    await assert_nothing_is_left(commands, broker)


async def test_purge_throws_strange_entries_away_too(broker: Broker, queue: Queue, commands) -> None:
    lane = broker.keys.lane("batch", "default")
    await commands.execute("XADD", lane, "*", "who", "knows")
    await enqueue(broker, "a", band="batch")
    await commands.execute("XADD", lane, "*", "who", "knows")
    assert await queue.purge("default") == 1
    await assert_nothing_is_left(commands, broker)
    assert await DeadLetter(commands, broker.keys).list() == []


async def test_purge_of_an_unknown_band_is_refused(queue: Queue) -> None:
    with pytest.raises(ValidationError, match="band must be one of interactive, standard, batch, got 'urgent'"):
        await queue.purge("t", "urgent")
