"""Conversations return to the engine whose cache holds them, for a bounded moment, and at nobody else's expense."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.broker import Broker, EngineCapacity, Entry, Queue
from penstock.shared.connection import CommandConnection
from penstock.shared.messages.requests import InputChunk
from penstock.shared.queue.policy import Order, QueuePolicy, TenantPolicy

from ..conftest import TTL_MS, die, enqueue, held, leave_to_others_for, take
from ..engine import Engine
from ..snapshot import read_snapshot
from ..test_states import end_segment
from .test_wakes import Woken, look, woken

__all__ = ["woken"]

pytestmark = pytest.mark.usefixtures("leave_for_ms")

# Longer than any test takes: what waits so long waits for nothing else.
PATIENT = QueuePolicy(affinity_ms=60_000)


@pytest.fixture
async def patient(queue: Queue) -> None:
    await queue.configure(PATIENT)


@pytest.fixture
def leave_for_ms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return how long an engine leaves to others what it has its part of: not at all unless a test says so."""
    leave_to_others_for(monkeypatch, getattr(request, "param", 0))


def turn(number: int, conversation: str = "c") -> dict[str, Any]:
    """Digests of a turn of a conversation, counted from 1: its own, and those of the turns before."""
    digests = tuple(f"{conversation}{turn}" for turn in range(number, 0, -1))
    return {"digests": digests[:4], "own_digests": digests[:1]}


async def answer(broker: Broker, engine: str, *request_ids: str) -> None:
    """Let an engine take what waits, which must be these, and end it."""
    claims = await take(broker, engine, 10)
    assert [claim.request_id for claim in claims] == list(request_ids)
    one = Engine(broker, engine, held=claims)
    await one.end(*request_ids)


async def ids(broker: Broker, engine: str, limit: int = 10, **options: Any) -> list[str]:
    return [claim.request_id for claim in await take(broker, engine, limit, **options)]


async def converse(broker: Broker, engine: str, conversation: str = "c", **options: Any) -> None:
    """Have the first turn of a conversation answered by an engine; the others live, and have looked since."""
    await enqueue(broker, f"{conversation}-first", **turn(1, conversation), **options)
    await answer(broker, engine, f"{conversation}-first")
    for name in ("e0", "e1", "e2"):
        await look(broker, name)


@pytest.mark.usefixtures("patient")
async def test_the_next_turn_is_left_to_the_engine_that_had_the_last(broker: Broker) -> None:
    await converse(broker, "e1")
    await enqueue(broker, "second", **turn(2))
    wave = await broker.claim("e0", EngineCapacity(max_num_seqs=10))
    assert wave.claims == []
    assert 0 < wave.retry_ms <= 60_000
    assert await ids(broker, "e1") == ["second"]


@pytest.mark.usefixtures("patient")
async def test_the_last_engine_that_got_a_turn_gets_the_next(broker: Broker) -> None:
    await converse(broker, "e1")
    await enqueue(broker, "second", **turn(2))
    await die(broker, "e1", external=True)
    await answer(broker, "e2", "second")
    await look(broker, "e1")
    await enqueue(broker, "third", **turn(3))
    assert await ids(broker, "e1") == await ids(broker, "e0") == []
    assert await ids(broker, "e2") == ["third"]


@pytest.mark.usefixtures("patient")
async def test_the_engine_that_resumed_a_turn_gets_the_next(broker: Broker) -> None:
    await enqueue(broker, "first", **turn(1))
    assert await ids(broker, "e0") == ["first"]
    await broker.release([held("first")])
    (claim,) = await take(broker, "e2", 1)
    await Engine(broker, "e2", held=[claim]).end("first")
    for name in ("e0", "e2"):
        await look(broker, name)
    await enqueue(broker, "second", **turn(2))
    assert await ids(broker, "e0") == []
    assert await ids(broker, "e2") == ["second"]


@pytest.mark.usefixtures("patient")
async def test_of_several_beginnings_the_longest_that_is_known_counts(broker: Broker) -> None:
    await converse(broker, "e1")
    await enqueue(broker, "second", **turn(2))
    await answer(broker, "e1", "second")
    await enqueue(broker, "again", digests=("other", "c1"), own_digests=("other",))
    await answer(broker, "e1", "again")
    await enqueue(broker, "branch", digests=("branch", "c0"), own_digests=("c2",))
    await answer(broker, "e2", "branch")  # it says that it ends as c2 does
    await look(broker, "e1")
    await look(broker, "e2")
    await enqueue(broker, "third", digests=("c3", "c2", "c1"), own_digests=("c3",))
    assert await ids(broker, "e1") == []
    assert await ids(broker, "e2") == ["third"]


@pytest.mark.usefixtures("patient")
async def test_a_turn_falls_back_to_the_engine_of_the_turn_before(broker: Broker, woken: Woken) -> None:
    await converse(broker, "e1")
    await enqueue(broker, "second", **turn(2))
    await broker.withdraw("e1")
    await answer(broker, "e2", "second")
    await look(broker, "e1")
    await look(broker, "e2")
    await die(broker, "e2", external=True)
    await woken()
    await enqueue(broker, "third", **turn(3))
    assert await woken() == ["e1"]
    assert await ids(broker, "e0") == []
    assert await ids(broker, "e1") == ["third"]


@pytest.mark.usefixtures("patient")
async def test_a_retry_is_anybodys(broker: Broker) -> None:
    await converse(broker, "e1")
    await enqueue(broker, "second", **turn(2))
    assert await ids(broker, "e1") == ["second"]
    await broker.release([held("second")])
    assert await ids(broker, "e0") == ["second"]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("how", ["dies", "lease", "withdraws", "full", "no cache left", "is a ward", "policy"])
async def test_a_turn_does_not_wait_for_an_engine_that_cannot_claim(
    broker: Broker, queue: Queue, commands: CommandConnection, how: str
) -> None:
    await converse(broker, "e1")
    await enqueue(broker, "second", num_prompt_tokens=50, max_tokens=1, **turn(2))
    if how == "dies":
        await die(broker, "e1", external=True)
    elif how == "lease":  # nobody knows yet
        await commands.execute("ZADD", broker.keys.leases, 0, "e1")
    elif how == "withdraws":
        await broker.withdraw("e1")
    elif how == "policy":
        await queue.configure(QueuePolicy(affinity_ms=0))
    elif how == "is a ward":  # it empties itself for a suspect
        await commands.execute("SET", broker.keys.prefix + "ward", "e1")
    else:
        room = "10 10 1000 100" if how == "full" else "10 9 1000 970"
        await commands.execute("HSET", broker.keys.prefix + "rooms", "e1", room)
        await commands.execute("HSET", broker.keys.prefix + "queue", "room_held_seqs", 25)  # as the others hold
    assert await ids(broker, "e0") == ["second"]


@pytest.mark.usefixtures("patient")
async def test_a_turn_does_not_wait_for_an_overloaded_engine(broker: Broker, commands: CommandConnection) -> None:
    await converse(broker, "e1")
    await commands.execute("HSET", broker.keys.prefix + "rooms", "e1", "10 9 1000 100")
    await commands.execute("HSET", broker.keys.prefix + "queue", "room_held_seqs", 9)
    await enqueue(broker, "second", **turn(2))
    assert await ids(broker, "e0") == ["second"]


async def test_the_moment_is_bounded(broker: Broker, queue: Queue, commands: CommandConnection) -> None:
    await queue.configure(QueuePolicy(affinity_ms=1))
    await converse(broker, "e1")
    await enqueue(broker, "second", **turn(2))
    while not await ids(broker, "e0"):
        pass
    stats = await queue.stats()
    assert (stats.num_warm, stats.num_warm_kept) == (1, 0)


@pytest.mark.usefixtures("patient")
async def test_other_tenants_and_bands_are_served_while_a_turn_waits(broker: Broker) -> None:
    await converse(broker, "e1")
    await enqueue(broker, "second", band="interactive", **turn(2))
    await enqueue(broker, "cold", tenant="other", band="interactive")
    await enqueue(broker, "late", tenant="other", band="batch")
    assert await ids(broker, "e0") == ["cold", "late"]
    assert await ids(broker, "e1") == ["second"]


@pytest.mark.usefixtures("patient")
async def test_a_warm_request_keeps_the_fair_order_of_its_tenant(broker: Broker) -> None:
    """Its tenant was served much and the other one little while both wait."""
    await enqueue(broker, "c-first", num_prompt_tokens=500, max_tokens=1, **turn(1))
    await enqueue(broker, "cold-0", "cold-1", "cold-2", tenant="other", num_prompt_tokens=50, max_tokens=1)
    assert sorted(await ids(broker, "e0", 2)) == ["c-first", "cold-0"]
    await enqueue(broker, "warm", num_prompt_tokens=50, max_tokens=1, **turn(2))
    assert await ids(broker, "e0", 3) == ["cold-1", "cold-2", "warm"]


@pytest.mark.usefixtures("patient")
async def test_a_lane_that_is_left_alone_keeps_its_turn(broker: Broker, commands: CommandConnection) -> None:
    await converse(broker, "e1")
    await enqueue(broker, "second", num_prompt_tokens=50, max_tokens=1, **turn(2))
    before = (await read_snapshot(commands, broker.keys)).of("ready")["standard"]["default"]
    for number in range(5):
        await enqueue(broker, f"cold-{number}", tenant="other", num_prompt_tokens=50, max_tokens=1)
    assert len(await ids(broker, "e0", 3)) == 3
    after = (await read_snapshot(commands, broker.keys)).of("ready")["standard"]
    assert after["default"] == before < after["other"]


@pytest.mark.usefixtures("patient")
async def test_inside_a_lane_an_engine_takes_its_own_first(broker: Broker) -> None:
    await converse(broker, "e1", "a")
    await converse(broker, "e2", "b")
    await enqueue(broker, "cold")
    await enqueue(broker, "for-e2", **turn(2, "b"))
    await enqueue(broker, "for-e1", **turn(2, "a"))
    assert await ids(broker, "e1", 1) == ["for-e1"]
    assert await ids(broker, "e2", 1) == ["for-e2"]
    assert await ids(broker, "e0", 1) == ["cold"]


@pytest.mark.usefixtures("patient")
async def test_no_request_is_passed_by_more_than_15_of_its_lane(broker: Broker) -> None:
    await converse(broker, "e1", "a")
    await enqueue(broker, "cold")
    for number in range(40):
        await enqueue(broker, f"warm-{number}", **turn(2, "a"))
    order = [(await ids(broker, "e1", 1, num_held=100))[0] for _ in range(17)]
    assert order == [*(f"warm-{number}" for number in range(15)), "cold", "warm-15"]


@pytest.mark.usefixtures("patient")
async def test_a_warm_request_that_does_not_fit_overtakes_no_request(broker: Broker) -> None:
    await converse(broker, "e1")
    await enqueue(broker, "cold", num_prompt_tokens=10, max_tokens=1)
    await enqueue(broker, "large", num_prompt_tokens=500, max_tokens=1, **turn(2))
    wave = await broker.claim(
        "e1", EngineCapacity(max_num_seqs=10, num_seqs=1, num_kv_tokens=600, num_held_kv_tokens=400)
    )
    assert [claim.request_id for claim in wave.claims] == ["cold"]


@pytest.mark.usefixtures("patient")
async def test_a_damaged_warm_request_overtakes_no_request(broker: Broker, commands: CommandConnection) -> None:
    await converse(broker, "e1")
    await enqueue(broker, "cold")
    await enqueue(broker, "second", **turn(2))
    await commands.execute("HSET", broker.keys.request("second"), "prompt", "much")
    assert await ids(broker, "e1") == ["cold"]
    assert await broker.state("second") == "parked"


@pytest.mark.usefixtures("patient")
async def test_with_deadlines_in_order_nothing_goes_in_front(broker: Broker, queue: Queue) -> None:
    await converse(broker, "e1")
    await queue.configure(QueuePolicy(order=Order.EDF, affinity_ms=60_000))
    await enqueue(broker, "cold")
    await enqueue(broker, "warm", **turn(2))
    assert await ids(broker, "e1", 1) == ["cold"]


@pytest.mark.usefixtures("patient")
async def test_a_tenant_over_its_quota_waits_however_warm(broker: Broker, queue: Queue) -> None:
    await queue.configure_tenant("default", TenantPolicy(max_concurrent_requests=1))
    await converse(broker, "e1")
    await enqueue(broker, "second", **turn(2))
    await enqueue(broker, "third", **turn(3))
    assert await ids(broker, "e1") == ["second"]
    assert await ids(broker, "e1", num_held=1) == []


@pytest.mark.parametrize("leave_for_ms", [60_000], indirect=True)
@pytest.mark.usefixtures("patient")
async def test_an_engine_that_has_its_part_takes_its_own_and_leaves_the_rest(broker: Broker) -> None:
    """Its warm requests come after those that it leaves to an emptier engine."""
    await converse(broker, "e1")
    await look(broker, "e1", held=1)
    await enqueue(broker, "cold", tenant="other")
    await enqueue(broker, "second", **turn(2))
    assert await ids(broker, "e1", 9, num_held=1) == ["second"]
    assert await ids(broker, "e0") == ["cold"]


@pytest.mark.parametrize("leave_for_ms", [60_000], indirect=True)
@pytest.mark.usefixtures("patient")
async def test_a_warm_request_for_another_engine_is_not_overtaken_by_a_lower_band(broker: Broker) -> None:
    await converse(broker, "e1")
    await look(broker, "e1", held=1)
    await enqueue(broker, "cold", tenant="other", band="interactive")
    await enqueue(broker, "second", **turn(2))
    assert await ids(broker, "e1", 9, num_held=1) == []


@pytest.mark.parametrize("leave_for_ms", [60_000], indirect=True)
async def test_an_engine_that_holds_much_more_than_its_part_leaves_its_own_as_well(
    broker: Broker, woken: Woken
) -> None:
    await converse(broker, "e1")
    await look(broker, "e1", held=9)
    await woken()
    await enqueue(broker, "second", **turn(2))
    assert await woken() == ["e1"]
    assert await ids(broker, "e1", 1, num_held=9) == []
    assert await woken() in (["e0"], ["e2"])
    assert await ids(broker, "e0") == ["second"]


@pytest.mark.usefixtures("patient")
async def test_a_claim_that_skips_many_warm_requests_retries_soon(broker: Broker) -> None:
    await converse(broker, "e1")
    for number in range(9):
        await enqueue(broker, f"warm-{number}", tenant=f"tenant-{number}", **turn(2))
    wave = await broker.claim("e0", EngineCapacity(max_num_seqs=10))
    assert (wave.claims, wave.retry_ms) == ([], 10)


@pytest.mark.usefixtures("patient")
async def test_the_warm_engine_is_woken_instead_of_the_emptiest(broker: Broker, woken: Woken) -> None:
    await converse(broker, "e1")
    await look(broker, "e1", held=5)
    await woken()
    await enqueue(broker, "second", **turn(2))
    assert await woken() == ["e1"]
    await enqueue(broker, "third", **turn(3))  # e1 has not looked since
    assert await woken() in (["e0"], ["e2"])


@pytest.mark.usefixtures("patient")
async def test_a_call_wakes_one_engine_for_all_that_is_warm_for_it(broker: Broker, woken: Woken) -> None:
    await converse(broker, "e1")
    await woken()
    warm = [Entry(request_id=f"w{i}", payload=b"p", result_ttl_ms=TTL_MS, **turn(2)) for i in range(3)]
    await broker.enqueue_many([*warm, Entry(request_id="cold", payload=b"p", result_ttl_ms=TTL_MS)])
    first, *others = await woken()
    assert (first, len(others)) == ("e1", 1)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("how", ["dies", "withdraws"])
async def test_another_engine_is_woken_for_requests_of_a_removed_warm_engine(
    broker: Broker, woken: Woken, how: str
) -> None:
    await converse(broker, "e1")
    await enqueue(broker, "second", **turn(2))
    assert await woken() == ["e1"]
    if how == "dies":
        await die(broker, "e1", external=True)
    else:
        await broker.withdraw("e1")
    assert await woken() in (["e0"], ["e2"])


async def test_a_policy_without_it_stores_and_holds_nothing(
    broker: Broker, queue: Queue, commands: CommandConnection
) -> None:
    await queue.configure(QueuePolicy(warm_ttl_s=None))
    await converse(broker, "e1")
    await enqueue(broker, "second", **turn(2))
    assert not (await read_snapshot(commands, broker.keys)).kinds & {"warm", "warm_for"}
    assert await ids(broker, "e0") == ["second"]
    await queue.configure(PATIENT)
    await enqueue(broker, "third", **turn(3))
    await queue.configure(QueuePolicy(warm_ttl_s=None))
    assert await ids(broker, "e0") == ["third"]
    assert "warm" not in (await read_snapshot(commands, broker.keys)).kinds


async def test_warm_marks_are_ignored_after_the_policy_disables_them(broker: Broker, queue: Queue) -> None:
    await queue.configure(PATIENT)
    await converse(broker, "e1")
    await queue.configure(QueuePolicy(affinity_ms=60_000, warm_ttl_s=None))
    await enqueue(broker, "second", **turn(2))
    assert await ids(broker, "e0") == ["second"]


async def test_warm_marks_expire(broker: Broker, queue: Queue, commands: CommandConnection) -> None:
    await queue.configure(QueuePolicy(warm_ttl_s=7.0))
    await converse(broker, "e1")
    found = await read_snapshot(commands, broker.keys)
    assert found.of("warm") == {"c1": b"e1"}
    assert 0 < found.ttl_ms("warm", "c1") <= 7000


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("how", ["claim", "cancel", "purge"])
async def test_nothing_is_left_of_a_request_that_has_left_its_lane(
    broker: Broker, queue: Queue, commands: CommandConnection, how: str
) -> None:
    await converse(broker, "e1")
    await enqueue(broker, "second", **turn(2))
    found = await read_snapshot(commands, broker.keys)
    assert found.of("warm_for")["e1"].keys() == {"second"}
    assert found.ttl_ms("warm_for", "e1") > 0
    if how == "claim":
        await ids(broker, "e1")
    elif how == "cancel":
        await broker.cancel("second")
    else:
        await queue.purge("default")
    found = await read_snapshot(commands, broker.keys)
    assert "warm_for" not in found.kinds
    assert "warm" not in found.of("request")["second"]


@pytest.mark.usefixtures("patient")
async def test_a_damaged_warm_mark_is_dropped_without_further_effect(
    broker: Broker, commands: CommandConnection
) -> None:
    await converse(broker, "e1")
    await enqueue(broker, "second", **turn(2))
    await commands.execute("HSET", broker.keys.request("second"), "warm", "nobody")
    await commands.execute("ZADD", broker.keys.prefix + "warm_for:e1", 1, "no-such-request")
    await commands.execute("SET", broker.keys.prefix + "warm_for:nobody", "a string")
    assert await ids(broker, "e0") == ["second"]
    assert await ids(broker, "e1") == []
    found = await read_snapshot(commands, broker.keys)
    assert found.of("warm_for").keys() == {"nobody"}


async def test_more_input_wakes_the_engine_of_the_previous_segment(broker: Broker, woken: Woken) -> None:
    await broker.renew("e0", [])
    await enqueue(broker, "a", is_resumable=True, digests=("itself",), own_digests=("a session", "itself"))
    await enqueue(broker, "other", digests=("other",), own_digests=("a session",))
    assert await ids(broker, "e2", 1) == ["a"]
    assert await ids(broker, "e0", 1) == ["other"]
    await end_segment(broker)
    for engine, number in (("e0", 1), ("e1", 2), ("e2", 5)):
        await look(broker, engine, held=number)
    await woken()
    await broker.input.extend("a", 1, InputChunk(prompt_token_ids=[1]), num_prompt_tokens=1, max_tokens=1)
    assert await woken() == ["e2"]
