"""Entries in a lane that are no requests, and ids that mean another request than they did: nothing else suffers."""

from __future__ import annotations

import msgspec
import pytest

from penstock.shared.broker import Broker, DeadLetter, Queue
from penstock.shared.queue.policy import Order, QueuePolicy

from ..conftest import CAUSE, assert_nothing_is_left, enqueue, finish_with, take


async def test_an_entry_of_a_foreign_writer_is_set_aside(broker: Broker, commands) -> None:
    lane = broker.keys.lane("standard", "default")
    await commands.execute("XADD", lane, "*", "nonsense", b"\xff\x00")
    await enqueue(broker, "a")
    assert [claim.request_id for claim in await take(broker, "e0", 1)] == ["a"]
    dead_letter = DeadLetter(commands, broker.keys)
    (dead,) = await dead_letter.list()
    assert not dead.is_request
    assert msgspec.msgpack.decode(dead.payload.replace(b"\xa2\xff\x00", b"\xc4\x02\xff\x00")) == [
        "nonsense",
        b"\xff\x00",
    ]
    assert not await dead_letter.replay(dead.request_id)
    assert not await commands.execute("EXISTS", lane)


@pytest.mark.parametrize("order", list(Order))
async def test_a_strange_entry_that_is_left_alone_in_its_lane_is_set_aside_too(
    broker: Broker, queue: Queue, commands, order: Order
) -> None:
    await queue.configure(QueuePolicy(order=order))
    await enqueue(broker, "a", timeout_ms=600_000)
    await commands.execute("XADD", broker.keys.lane("standard", "default"), "*", "who", "knows")
    (claim,) = await take(broker, "e0", 1)
    await finish_with(broker, claim, num_output=1)
    assert await take(broker, "e0", 1) == []
    assert len(await DeadLetter(commands, broker.keys).list()) == 1
    await assert_nothing_is_left(commands, broker)
    await enqueue(broker, "b")
    assert [claim.request_id for claim in await take(broker, "e0", 1)] == ["b"]


async def test_strange_entries_of_one_id_in_two_lanes_are_both_kept(broker: Broker, commands) -> None:
    for tenant in "tu":
        await commands.execute("XADD", broker.keys.lane("standard", tenant), "7-7", "from", tenant)
        await enqueue(broker, tenant, tenant=tenant)
    assert len(await take(broker, "e0", 9)) == 2
    dead = await DeadLetter(commands, broker.keys).list()
    assert sorted(msgspec.msgpack.decode(one.payload)[1] for one in dead) == ["t", "u"]


@pytest.mark.parametrize("order", list(Order))
async def test_an_entry_without_its_request_does_not_affect_others(
    broker: Broker, queue: Queue, commands, order: Order
) -> None:
    """Happens on a server that evicts keys; the entry is the first by deadline and by arrival."""
    await queue.configure(QueuePolicy(order=order))
    await enqueue(broker, "gone", timeout_ms=100_000)
    await enqueue(broker, "a", timeout_ms=200_000)
    await enqueue(broker, "b")
    await commands.execute("DEL", broker.keys.request("gone"))
    assert [claim.request_id for claim in await take(broker, "e0", 9)] == ["a", "b"]


async def test_replay_does_not_touch_a_living_request_that_has_the_id_now(broker: Broker, commands) -> None:
    """The result of the parked one expired, and its id was used anew."""
    dead_letter = DeadLetter(commands, broker.keys)
    await enqueue(broker, "a")
    (claim,) = await take(broker, "e0", 1)
    assert await broker.park(claim, CAUSE, "validation_error", "unreadable")
    await commands.execute("DEL", broker.keys.request("a"), broker.keys.log("a"))
    await enqueue(broker, "a")
    assert not await dead_letter.replay("a")
    (claim,) = await take(broker, "e0", 1)
    assert not await dead_letter.replay("a")
    await finish_with(broker, claim, num_output=1)
    assert await dead_letter.replay("a")
    (claim,) = await take(broker, "e0", 1)
    await finish_with(broker, claim, num_output=1)
    await assert_nothing_is_left(commands, broker)
