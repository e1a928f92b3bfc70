"""What keys change: after a question, by the calls that commands and pages make, with an entry in the audit."""

from __future__ import annotations

import pytest

from penstock.ops.views.access import Access
from penstock.producer.control.secret_keys import Role
from penstock.shared.broker import DeadLetter
from penstock.shared.queue.lifecycle import RequestState

from .conftest import Seat, Terminal


async def told(terminal: Terminal) -> list[tuple[str, ...]]:
    return [(one.actor, one.via, one.action, one.target, one.result) for one in await terminal.entries()]


async def at(seat: Seat, table: str, *words: str) -> None:
    """Go to a table, and wait until it shows these."""
    await seat.press(table)
    await seat.sees(*words)


async def test_a_queue_is_paused_and_resumed_from_the_models(terminal: Terminal) -> None:
    async with terminal.seat() as seat:
        await at(seat, "1", "open")
        await seat.press("p")
        await seat.sees("pause the queue of m?")
        await seat.press("n")
        await seat.sees("nothing was done")
        assert not await terminal.queue.is_paused()
        await seat.press("p", "y")
        await seat.sees("m is paused; 0 running requests keep running", "paused")
        assert await terminal.queue.is_paused()
        await seat.sees("the queue of m is paused; 0 wait")
        await seat.press("p")
        await seat.sees("resume the queue of m?")
        await seat.press("y")
        await seat.sees("m is resumed")
        assert not await terminal.queue.is_paused()
    assert await told(terminal) == [
        ("olga", "top", "queue.pause", "m", "ok"),
        ("olga", "top", "queue.resume", "m", "ok"),
    ]


async def test_running_requests_are_requeued_from_an_empty_table(terminal: Terminal) -> None:
    await terminal.enqueue("runs")
    await terminal.claim()
    async with terminal.seat() as seat:
        await at(seat, "2", "m: open", "1 running")
        await seat.press("p", "r")
        await seat.sees("1 running requests were requeued", "PAUSED")
    assert await terminal.broker.state("runs") is RequestState.QUEUED


async def test_a_request_is_cancelled_from_its_own_page(terminal: Terminal) -> None:
    await terminal.enqueue("waits")
    async with terminal.seat() as seat:
        await at(seat, "3", "waits")
        await seat.press("enter")
        await seat.sees("request waits of m")
        await seat.press("c")
        await seat.sees("cancel request waits")
        await seat.press("y")
        await seat.sees("the request is cancelled", "cancelled at")
    assert await terminal.broker.state("waits") is RequestState.CANCELLED
    assert await told(terminal) == [("olga", "top", "request.cancel", "waits", "ok")]


async def test_a_parked_request_is_replayed_and_another_thrown_away_by_its_word(terminal: Terminal) -> None:
    await terminal.park("one", prompt="a")
    await terminal.park("two", prompt="b")
    async with terminal.seat() as seat:
        await at(seat, "5", "one", "two")
        await seat.press("s", "home", "r")
        await seat.sees("queue request one again")
        await seat.press("y")
        await seat.sees("one is queued again", "1 parked")
        await seat.press("x")
        await seat.sees("purge request two?")
        await seat.press("y", *"one", "enter")
        await seat.sees("nothing was done")
        await seat.press("x", "y", "escape")
        await seat.sees("nothing was done")
        assert await terminal.broker.state("two") is RequestState.PARKED
        await seat.press("x", "y", *"two", "enter")
        await seat.sees("two is purged", "0 parked")
        await seat.press("r")
        await seat.sees("there is nothing to change")
    assert await terminal.broker.state("one") is RequestState.QUEUED
    assert [entry[2] for entry in await told(terminal)] == ["dead.replay", "dead.purge"]


async def test_all_of_one_input_are_replayed(terminal: Terminal) -> None:
    for name in ("one", "two"):
        await terminal.park(name, prompt="the same")
    await terminal.park("other", prompt="another")
    async with terminal.seat() as seat:
        await at(seat, "5", "one", "two", "other")
        await seat.press("s", "end", "R")
        await seat.sees("queue all requests with this input again? 2 are shown")
        await seat.press("y")
        await seat.sees("2 requests with this input are queued again", "1 parked")


async def test_waiting_requests_of_a_tenant_are_purged_by_its_name(terminal: Terminal) -> None:
    await terminal.enqueue("waits", tenant="acme")
    async with terminal.seat() as seat:
        await at(seat, "2", "acme")
        await seat.press("x")
        await seat.sees("cancel all 1 waiting requests of tenant acme?")
        await seat.press("y", *"acme", "enter")
        await seat.sees("cancelled 1 waiting requests of acme")
    assert await terminal.broker.state("waits") is RequestState.CANCELLED


async def test_a_worker_is_drained_while_the_screen_keeps_updating(terminal: Terminal) -> None:
    async with terminal.seat() as seat:
        await at(seat, "4", "host-1-0")
        await seat.press("d")
        await seat.sees("drain worker host-1?")
        await seat.press("y")
        await seat.sees("in progress")
        await at(seat, "1", "MODEL")
        # No supervisor listens in this test, so the order is done when the worker is gone.
        await terminal.connection.execute("SREM", terminal.keys.engines(), "host-1-0")
        await terminal.connection.execute("DEL", terminal.keys.engine("host-1-0"))
        await seat.sees("worker host-1 is draining")
    assert await told(terminal) == [("olga", "top", "worker.drain", "host-1", "ok")]


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR])
async def test_an_insufficient_role_is_reported(role: Role, terminal: Terminal) -> None:
    await terminal.park("dies")
    async with terminal.seat(Access("", role)) as seat:
        await at(seat, "5", "dies")
        await seat.press("x")
        await seat.sees(f"this needs the role admin; yours is {role}")
    assert await terminal.broker.state("dies") is RequestState.PARKED
    assert await told(terminal) == []


async def test_a_failed_action_is_reported_in_a_sentence(terminal: Terminal) -> None:
    await terminal.park("dies")
    async with terminal.seat() as seat:
        await at(seat, "5", "dies")
        await seat.press("r")
        await seat.sees("queue request dies again")
        # Somebody else is quicker.
        await DeadLetter(terminal.connection, terminal.keys.model("m")).purge("dies")
        await seat.press("y")
        await seat.sees("nothing was done: no request 'dies' of m is parked")
