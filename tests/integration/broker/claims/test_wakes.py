"""What comes wakes as many engines as it brings requests, those with room, the emptiest first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from penstock.shared.broker import Broker, EngineCapacity, Entry, Queue
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.messages.requests import InputChunk
from penstock.shared.queue.lifecycle import RequestState
from penstock.shared.queue.policy import TenantPolicy

from ..conftest import CAUSE, change_script, die, enqueue, final, held, record, take
from ..snapshot import read_snapshot
from ..test_states import bring_to, end_segment

Woken = Callable[[], Awaitable[list[str]]]


@pytest.fixture
async def woken(broker: Broker, subscriber: Subscriber) -> Woken:
    """Return the engines that were woken since the last call, in order (e0 to e9)."""
    names: list[str] = []
    for engine in (f"e{number}" for number in range(10)):
        await subscriber.subscribe(broker.keys.engine_wake(engine), lambda _, name=engine: names.append(name))
    barriers = 0

    async def since_last_call() -> list[str]:
        nonlocal barriers
        barriers += 1  # what was published before is here when this is subscribed
        await subscriber.subscribe(broker.keys.output(f"barrier-{barriers}"), lambda _: None)
        found = names.copy()
        names.clear()
        return found

    return since_last_call


async def look(broker: Broker, engine: str, *, held: int = 0, most: int = 10) -> None:
    """A claim that finds nothing; the engine holds ``held`` of ``most`` sequences."""
    assert (await broker.claim(engine, EngineCapacity(max_num_seqs=most, num_seqs=held))).claims == []


async def test_one_engine_is_woken_per_request_and_the_emptiest_first(broker: Broker, woken: Woken) -> None:
    for engine, number in (("e0", 4), ("e1", 2), ("e2", 8), ("e3", 6)):
        await look(broker, engine, held=number)
    await enqueue(broker, "a")
    assert await woken() == ["e1"]
    await enqueue(broker, "b", "c")
    assert await woken() == ["e0", "e3"]


async def test_a_call_wakes_one_for_each_of_its_requests(broker: Broker, woken: Woken) -> None:
    for number in range(5):
        await look(broker, f"e{number}", held=number)
    entries = [Entry(request_id=name, payload=b"p", result_ttl_ms=1000, tenant=name) for name in "abc"]
    await broker.enqueue_many(entries)
    assert await woken() == ["e0", "e1", "e2"]


async def test_a_woken_engine_is_not_woken_again_before_it_claims(broker: Broker, woken: Woken) -> None:
    await look(broker, "e0")
    await enqueue(broker, "a", "b")
    assert await woken() == ["e0"]
    assert len(await take(broker, "e0", 5)) == 2
    await enqueue(broker, "c")
    assert await woken() == ["e0"]


async def test_full_or_withdrawn_engines_are_not_woken(broker: Broker, woken: Woken) -> None:
    await enqueue(broker, "a", "b")
    assert len(await take(broker, "e0", 1)) == 1  # full
    assert len(await take(broker, "e1", 1)) == 1
    await look(broker, "e2")
    await broker.withdraw("e2")  # sleeps, or drains
    await look(broker, "e3")
    await die(broker, "e3", external=True)
    await enqueue(broker, "c")
    assert await woken() == []


async def test_an_engine_that_runs_a_suspect_is_not_woken(broker: Broker, woken: Woken) -> None:
    await enqueue(broker, "bad")
    await take(broker, "e0", 1)
    await die(broker, "e0", external=False)
    assert [claim.alone_until >= 0 for claim in await take(broker, "e1", 5)] == [True]
    await enqueue(broker, "a")
    assert await woken() == []


async def test_engines_with_an_expired_lease_are_not_woken(
    broker: Broker, woken: Woken, commands: CommandConnection
) -> None:
    await look(broker, "e0")
    await look(broker, "e1", held=5)
    await commands.execute("ZADD", broker.keys.leases, 0, "e0")
    await enqueue(broker, "a")
    assert await woken() == ["e1"]


async def fill_up_to_what_is_kept(broker: Broker) -> None:
    """Two of e0's eight sequences are free: for "small", which has less than an equal part, not for "flood"."""
    await enqueue(broker, "s0", tenant="small", num_prompt_tokens=1)
    await enqueue(broker, *(f"f{number}" for number in range(5)), tenant="flood", num_prompt_tokens=1)
    wave = await broker.claim("e0", EngineCapacity(max_num_seqs=8, num_kept_seqs=2))
    assert len(wave.claims) == 6


async def test_for_kept_sequences_only_those_are_woken_for_that_have_few(broker: Broker, woken: Woken) -> None:
    await fill_up_to_what_is_kept(broker)
    await enqueue(broker, "f6", tenant="flood")
    assert await woken() == []
    await enqueue(broker, "s1", tenant="small")
    assert await woken() == ["e0"]


async def test_engines_with_free_capacity_are_woken_before_engines_with_reserved_sequences(
    broker: Broker, woken: Woken
) -> None:
    await fill_up_to_what_is_kept(broker)
    await look(broker, "e1", held=9)
    await enqueue(broker, "s1", "s2", tenant="small")
    assert await woken() == ["e1", "e0"]


async def test_when_nothing_is_kept_any_more_all_are_woken_for(
    broker: Broker, woken: Woken, commands: CommandConnection
) -> None:
    await fill_up_to_what_is_kept(broker)
    queue = broker.keys.prefix + "queue"
    shared_at = int(await commands.execute("HGET", queue, "shared_at"))
    await broker.cancel("s0")
    await commands.execute("HSET", queue, "shared_at", shared_at - 60_000)
    await enqueue(broker, "f6", tenant="flood")
    assert await woken() == ["e0"]


async def test_no_engine_is_woken_during_a_pause_and_all_are_woken_after_it(
    broker: Broker, queue: Queue, subscriber: Subscriber, woken: Woken
) -> None:
    told: list[bytes] = []
    await subscriber.subscribe(broker.keys.wake, told.append)
    await look(broker, "e0")
    await queue.pause(put_back=False)
    await enqueue(broker, "a")
    await look(broker, "e0")
    assert (await woken(), told) == ([], [])
    await queue.resume()
    assert (await woken(), len(told)) == ([], 1)


async def put_back(broker: Broker) -> None:
    assert await broker.release([held("a")]) == 1


async def lose_engine(broker: Broker) -> None:
    assert await die(broker, "e0", external=True) == (1, 0)


async def extend(broker: Broker) -> None:
    await end_segment(broker)
    await broker.input.extend("a", 1, InputChunk(prompt_token_ids=[1]), num_prompt_tokens=1, max_tokens=1)


@pytest.mark.parametrize("come_back", [put_back, lose_engine, extend])
async def test_a_requeued_request_wakes_one_engine(
    come_back: Callable[[Broker], Awaitable[None]], broker: Broker, woken: Woken
) -> None:
    await bring_to(broker, RequestState.CLAIMED)
    await look(broker, "e1", held=1)
    await look(broker, "e2", held=2)
    await come_back(broker)
    assert await woken() == ["e1"]


async def test_an_end_wakes_as_many_as_the_quota_lets_start(broker: Broker, queue: Queue, woken: Woken) -> None:
    await queue.configure_tenant("narrow", TenantPolicy(max_concurrent_requests=2))
    await enqueue(broker, "a", "b", "c", "d", "e", tenant="narrow")
    assert len(await take(broker, "e0", 2)) == 2
    for number in range(1, 5):
        await look(broker, f"e{number}", held=number)
    await woken()
    assert await broker.finish([final("a", 1, 0, 7)]) == []
    assert await woken() == ["e1"]


async def test_a_reaper_wakes_another_engine_for_unclaimed_requests(
    broker: Broker, woken: Woken, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No machine is so slow that as much passes between the two looks below.
    old = "WAKE_EVERY_MS, MAX_WOKEN ="
    change_script(monkeypatch, "reap", f"{old} 10000, 500,", f"{old} 10000, 600000,")
    for number in range(3):
        await look(broker, f"e{number}", held=number)
    await enqueue(broker, "a")
    assert await woken() == ["e0"]  # which is dead, though nobody knows
    await broker.reap(CAUSE, max_deliveries=3)
    assert await woken() == ["e1"]
    # Another reaper, a moment later: not every look of each of them wakes somebody.
    await broker.reap(CAUSE, max_deliveries=3)
    assert await woken() == []


async def test_a_reaper_wakes_no_engine_for_requests_over_quota(broker: Broker, queue: Queue, woken: Woken) -> None:
    await queue.configure_tenant("narrow", TenantPolicy(max_concurrent_requests=1))
    await enqueue(broker, "a", "b", tenant="narrow")
    assert len(await take(broker, "e0", 5)) == 1
    await look(broker, "e1")
    await broker.reap(CAUSE, max_deliveries=3)
    assert await woken() == []


async def test_capacity_sums_changed_by_a_foreign_writer_are_recounted(
    broker: Broker, commands: CommandConnection
) -> None:
    await look(broker, "e0", held=3)
    await look(broker, "e1", held=4)
    await commands.execute("HDEL", broker.keys.prefix + "rooms", "e1")
    await commands.execute("HSET", broker.keys.prefix + "queue", "room_seqs", 999)
    for _ in range(2):  # the first look of all only notes the time
        await broker.reap(CAUSE, max_deliveries=3, lease_ttl_ms=0)
    sums = (await read_snapshot(commands, broker.keys)).one("queue")
    assert (sums["rooms"], sums["room_seqs"], sums["room_held_seqs"]) == ("1", "10", "3")


async def test_a_crowd_of_dead_engines_and_clients_is_reaped_in_parts(
    broker: Broker, commands: CommandConnection
) -> None:
    await enqueue(broker, *(f"r{number}" for number in range(65)), client_id="gone", client_ttl_ms=600_000)
    for number in range(65):
        assert len(await take(broker, f"engine{number}", 1)) == 1
        await commands.execute("ZADD", broker.keys.leases, 0, f"engine{number}")
    await broker.reap(CAUSE, max_deliveries=3, lease_ttl_ms=0)
    await commands.execute("CONFIG", "RESETSTAT")
    found = await broker.reap(CAUSE, max_deliveries=3, lease_ttl_ms=0)
    assert {one.name for one in found} == {f"engine{number}" for number in range(65)}
    calls = await commands.execute("INFO", "commandstats")
    assert b"cmdstat_evalsha:calls=2," in calls
    assert await broker.append([record("r0", 1, 0, 7)]) == ["r0"]
