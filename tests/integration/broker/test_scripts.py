"""The broker's scripts against a real Redis, one change of state at a time."""

from __future__ import annotations

import msgspec
import pytest

from penstock.shared.broker import Broker
from penstock.shared.messages.deltas import Delta
from penstock.shared.redis_access.script import linked_text

from .conftest import TTL_MS, assert_nothing_is_left, enqueue, final, held, record, take


async def test_claim_hands_out_in_order_and_up_to_the_limit(broker: Broker) -> None:
    await enqueue(broker, "a", "b", "c")
    first = await take(broker, "e0", 2)
    second = await take(broker, "e1", 2)
    assert [claim.request_id for claim in first] == ["a", "b"]
    assert [claim.request_id for claim in second] == ["c"]
    assert [(claim.attempt, claim.num_logged_tokens) for claim in first] == [(1, 0)] * 2
    assert await take(broker, "e0", 2) == []


async def test_enqueueing_an_id_twice_runs_it_once(broker: Broker) -> None:
    await enqueue(broker, "a")
    assert await broker.enqueue("a", b"other", result_ttl_ms=TTL_MS) == "queued"
    (claim,) = await take(broker, "e0", 10)
    assert claim.payload == b"payload"
    assert await broker.enqueue("a", b"other", result_ttl_ms=TTL_MS) == "claimed"


async def test_append_logs_and_publishes_in_order(broker: Broker, subscriber, commands) -> None:
    published: list[bytes] = []
    await subscriber.subscribe(broker.keys.output("a"), published.append)
    await enqueue(broker, "a")
    await take(broker, "e0", 1)
    assert await broker.append([record("a", 1, 0, 7, 8)]) == []
    assert await broker.finish([final("a", 1, 2, 9)]) == []
    log = await broker.read_log("a")
    assert [(delta.index, delta.token_ids) for delta in log] == [(0, [7, 8]), (2, [9])]
    await subscriber.subscribe(broker.keys.output("barrier"), lambda _: None)
    assert [msgspec.msgpack.decode(data, type=Delta) for data in published] == log
    assert await broker.state("a") == "finished"
    assert 0 < await commands.execute("PTTL", broker.keys.log("a")) <= TTL_MS
    assert 0 < await commands.execute("PTTL", broker.keys.request("a")) <= TTL_MS
    await assert_nothing_is_left(commands, broker)


async def test_a_repeated_append_or_finish_writes_once(broker: Broker) -> None:
    await enqueue(broker, "a")
    await take(broker, "e0", 1)
    for _ in range(2):
        assert await broker.append([record("a", 1, 0, 7)]) == []
    for _ in range(2):
        assert await broker.finish([final("a", 1, 1, 8)]) == []
    assert [delta.token_ids for delta in await broker.read_log("a")] == [[7], [8]]


async def test_a_stale_epoch_is_refused_by_the_server(broker: Broker) -> None:
    await enqueue(broker, "a")
    await take(broker, "e0", 1)
    assert await broker.append([record("a", 1, 0, 7)]) == []
    assert await broker.release([held("a", 1)]) == 1
    (claim,) = await take(broker, "e1", 1)
    assert (claim.attempt, claim.num_logged_tokens) == (2, 1)
    assert await broker.append([record("a", 1, 1, 99)]) == ["a"]
    assert await broker.finish([final("a", 1, 1, 99)]) == ["a"]
    assert await broker.release([held("a", 1)]) == 0
    assert await broker.finish([final("a", 2, 1, 8)]) == []
    assert [delta.token_ids for delta in await broker.read_log("a")] == [[7], [8]]


async def test_a_write_that_would_leave_a_gap_is_refused(broker: Broker) -> None:
    await enqueue(broker, "a")
    await take(broker, "e0", 1)
    assert await broker.append([record("a", 1, 3, 7)]) == ["a"]
    assert await broker.finish([final("a", 1, 3)]) == ["a"]
    assert await broker.read_log("a") == []


async def test_one_refusal_leaves_the_others_of_the_step_alone(broker: Broker) -> None:
    await enqueue(broker, "a", "b", "c")
    await take(broker, "e0", 3)
    await broker.cancel("b")
    records = [record(request_id, 1, 0, 5) for request_id in "abc"]
    assert await broker.append(records) == ["b"]
    assert [delta.token_ids for delta in await broker.read_log("c")] == [[5]]


@pytest.mark.parametrize("claimed", [False, True])
async def test_cancel_ends_a_request_at_once_and_only_once(broker: Broker, commands, claimed: bool) -> None:
    await enqueue(broker, "a")
    if claimed:
        await take(broker, "e0", 1)
        await broker.append([record("a", 1, 0, 7, 8)])
    for _ in range(2):
        assert await broker.cancel("a") == "cancelled"
    *_, end = await broker.read_log("a")
    assert (end.index, end.token_ids, end.finish_reason) == (2 if claimed else 0, [], "cancelled")
    assert sum(delta.finished for delta in await broker.read_log("a")) == 1
    assert await take(broker, "e1", 1) == []
    assert await broker.append([record("a", 1, 2, 9)]) == (["a"])
    await assert_nothing_is_left(commands, broker)


async def test_cancel_notifies_the_engine_that_runs_the_request(broker: Broker, subscriber) -> None:
    from penstock.shared.messages.supervision import CancelCommand, EngineCommand

    commands: list[bytes] = []
    await subscriber.subscribe(broker.keys.engine_commands("e0"), commands.append)
    await enqueue(broker, "a")
    await take(broker, "e0", 1)
    await broker.cancel("a")
    await subscriber.subscribe(broker.keys.output("barrier"), lambda _: None)
    assert [msgspec.msgpack.decode(c, type=EngineCommand) for c in commands] == [CancelCommand("a")]


async def test_cancel_after_the_end_or_of_an_unknown_id_does_nothing(broker: Broker) -> None:
    await enqueue(broker, "a")
    await take(broker, "e0", 1)
    await broker.finish([final("a", 1, 0, 1)])
    assert await broker.cancel("a") == "finished"
    assert await broker.cancel("never") is None
    assert len(await broker.read_log("a")) == 1


async def test_a_released_request_is_claimed_before_new_ones(broker: Broker) -> None:
    await enqueue(broker, "a")
    await take(broker, "e0", 1)
    await enqueue(broker, "b")
    await broker.release([held("a", 1)])
    assert [claim.request_id for claim in await take(broker, "e1", 5)] == ["a", "b"]


async def test_a_cancelled_released_request_is_not_claimed(broker: Broker) -> None:
    await enqueue(broker, "a")
    await take(broker, "e0", 1)
    await broker.release([held("a", 1)])
    await broker.cancel("a")
    assert await take(broker, "e1", 5) == []


async def test_scripts_survive_a_flush_of_the_script_cache(broker: Broker, commands) -> None:
    await enqueue(broker, "a")
    await commands.execute("SCRIPT", "FLUSH")
    assert [claim.request_id for claim in await take(broker, "e0", 1)] == ["a"]


@pytest.mark.parametrize("num_names", [1, 59, 60, 61, 150])
async def test_a_text_uses_all_names_of_those_before_it(commands, num_names: int) -> None:
    """A Lua function uses at most 60 names of those around it; a text that needs more is none of its own."""
    names = [f"name_{i}" for i in range(num_names)]
    parts = {"first": "".join(f"local {name} = {i}\n" for i, name in enumerate(names))}
    functions = [f"function () return {' + '.join(names[i : i + 50])} end" for i in range(0, num_names, 50)]
    parts["second"] = f"-- uses: first\nlocal functions = {{{', '.join(functions)}}}\n"
    text = "-- uses: second\nlocal sum = 0\nfor _, part in ipairs(functions) do sum = sum + part() end\nreturn sum\n"
    text = linked_text(text, parts)
    assert text.count("(function()") == (2 if num_names <= 60 else 1)
    assert await commands.execute("EVAL", text, 0) == sum(range(num_names))
