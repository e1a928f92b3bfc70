"""Who is at an item, and who is no more."""

from __future__ import annotations

import asyncio

import pytest

from penstock.producer.background.agenda import Agenda, DueItem
from penstock.producer.jobs.context import CutOffError, run_held
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys

from .processes import until


@pytest.fixture
def keys(namespace: str) -> Keys:
    return Keys(namespace)


async def due_ms(commands: CommandConnection, keys: Keys, item: str) -> float:
    """When an item is due, or its lease ends."""
    return float(await commands.execute("ZSCORE", keys.jobs_due(), item))


async def test_an_item_is_held_by_one_until_its_lease_ends(commands: CommandConnection, keys: Keys) -> None:
    agenda = Agenda(commands, keys, lease_ttl_s=600)
    assert await agenda.hold("batch", "b:1") is None
    await agenda.add("batch", "b:1", 3600)
    assert await agenda.due(10) == []
    await agenda.add("batch", "b:1")
    await agenda.add("batch", "b:1", 3600)  # later than it is: stays as it is
    assert await agenda.due(10) == [DueItem("batch", "b:1")]

    first = await agenda.hold("batch", "b:1")
    assert first is not None
    assert await agenda.hold("batch", "b:1") is None
    assert not await agenda.add("batch", "b:1")
    assert await agenda.due(10) == []

    seconds, _ = await commands.execute("TIME")
    assert 0 < await due_ms(commands, keys, "batch:b:1") - 1000 * int(seconds) < 601_000
    await commands.execute("ZADD", keys.jobs_due(), "XX", 1000 * int(seconds), "batch:b:1")  # as if it had passed
    assert await agenda.due(10) == [DueItem("batch", "b:1", first.token)]
    second = await agenda.hold("batch", "b:1")
    assert second is not None
    assert not await first.let_go(None)
    await asyncio.wait_for(first.keep(), 60)  # returns: it is lost
    assert await second.let_go(0.0)
    assert await agenda.due(10) == [DueItem("batch", "b:1")]
    third = await agenda.hold("batch", "b:1")
    assert third is not None
    assert await third.let_go(None)
    assert await agenda.hold("batch", "b:1") is None


async def test_work_runs_while_its_lease_is_renewed_and_is_cancelled_when_it_is_lost(
    commands: CommandConnection, keys: Keys
) -> None:
    agenda = Agenda(commands, keys, lease_ttl_s=0.2)
    await agenda.add("batch", "b1")
    hold = await agenda.hold("batch", "b1")
    assert hold is not None
    was_cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    running = asyncio.create_task(run_held(hold, work()))
    first_ms = await due_ms(commands, keys, "batch:b1")

    async def has_outlived_its_lease() -> bool:
        return await due_ms(commands, keys, "batch:b1") > first_ms + 400

    await until(has_outlived_its_lease, "the lease is not renewed")
    assert not running.done()
    await agenda.remove("batch", "b1")
    with pytest.raises(CutOffError):
        await asyncio.wait_for(running, 60)
    assert was_cancelled.is_set()
