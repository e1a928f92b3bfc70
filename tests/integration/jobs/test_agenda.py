"""Who is at an item, and who is no more."""

from __future__ import annotations

import asyncio

import pytest

from penstock.producer.agenda import Agenda, DueItem
from penstock.producer.jobs.holding import CutOffError, run_held
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys

from .processes import until


@pytest.fixture
def agenda(commands: CommandConnection, namespace: str) -> Agenda:
    return Agenda(commands, Keys(namespace), lease_ttl_s=0.2)


async def test_an_item_is_held_by_one_until_its_lease_ends(agenda: Agenda) -> None:
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

    async def is_due() -> bool:
        return await agenda.due(10) == [DueItem("batch", "b:1", first.token)]

    await until(is_due, "a lease that nobody renews does not end")
    second = await agenda.hold("batch", "b:1")
    assert second is not None
    assert not await first.let_go(None)
    await asyncio.wait_for(first.keep(), 10)  # returns: it is lost
    assert await second.let_go(0.0)
    assert await agenda.due(10) == [DueItem("batch", "b:1")]
    third = await agenda.hold("batch", "b:1")
    assert third is not None
    assert await third.let_go(None)
    assert await agenda.hold("batch", "b:1") is None


async def test_work_goes_on_while_its_hold_is_kept_and_is_cut_off_when_it_is_lost(agenda: Agenda) -> None:
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
    # Longer than the lease, which is renewed meanwhile.
    done, _ = await asyncio.wait({running}, timeout=0.5)
    assert not done
    assert await agenda.due(10) == []
    await agenda.remove("batch", "b1")
    with pytest.raises(CutOffError):
        await asyncio.wait_for(running, 60)
    assert was_cancelled.is_set()
