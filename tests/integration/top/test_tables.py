"""What the tables show, and what stands behind their rows."""

from __future__ import annotations

import asyncio

from penstock.ops.lab.terminal_picture import picture
from penstock.ops.views.access import Access
from penstock.producer.control.secret_keys import Role
from penstock.shared.broker import EngineCapacity
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.supervision import EngineState

from ...processes import DEADLINE_S
from ..dashboard.test_devices import ASLEEP, AWAKE, write_device
from .conftest import SIZE, Terminal

EVIL = "[red]x[/] \x1b[2J\r\u202e[/bold]"


async def test_each_table_by_its_number_within_80_by_24(terminal: Terminal) -> None:
    await terminal.park("dies")
    await terminal.enqueue("waits", tenant="acme")
    await write_device(terminal, AWAKE, ASLEEP)
    shown = (
        ("1", ("MODEL", "WAITING", "EST. WAIT", "ENGINES", "1 request of m parked")),
        ("2", ("TENANT", "acme", "m: open, 1 waiting")),
        ("3", ("REQUEST", "waits", "waiting", "acme")),
        ("4", ("ENGINE", "host-1-0", "ready", "1 engine of 1 worker")),
        ("5", ("REQUEST", "dies", "killed by signal 11", "1 parked")),
        ("6", ("chat", "awake, pinned", "asleep 1", "1.2", "5.0 GiB of 8.0 GiB", "last: none")),
    )
    async with terminal.seat() as seat:
        for number, words in shown:
            await seat.press(number)
            await seat.sees(*words)
            assert len(seat.lines) == SIZE[1]
            assert all(len(line) <= SIZE[0] for line in seat.lines)
            assert "? help" in seat.lines[-1]
            assert "q quit" in seat.lines[-1]
        await seat.press("tab")
        await seat.sees("MODEL", "ENGINES")
        await seat.press("shift+tab")
        await seat.sees("LATE", "coder")


async def test_figures_move_by_themselves(terminal: Terminal) -> None:
    async with terminal.seat() as seat:
        await seat.press("3")
        await seat.sees("0 running, 0 waiting")
        await terminal.enqueue("comes")
        await seat.sees("comes", "0 running, 1 waiting")
        await terminal.claim()
        await seat.sees("running", "1 running, 0 waiting")


async def test_enter_leads_from_a_model_to_a_tenant_to_a_request_and_its_tokens(terminal: Terminal) -> None:
    await terminal.enqueue("of-acme", tenant="acme", prompt="what is it?")
    await terminal.enqueue("of-globex", tenant="globex")
    async with terminal.seat() as seat:
        await seat.sees("ENGINES", "open")
        await seat.press("enter")
        await seat.sees("TENANT", "acme", "globex")
        await seat.press("enter")
        text = await seat.sees("REQUEST", "of-acme", "filter tenant=acme")
        assert "of-globex" not in text
        await seat.press("enter")
        await seat.sees("request of-acme of m", "waiting", "what is it?", "no token yet")
        claims = (await terminal.broker.claim("host-1-0", EngineCapacity(max_num_seqs=100))).claims
        epoch = next(claim.epoch for claim in claims if claim.request_id == "of-acme")
        await terminal.append("of-acme", epoch, Delta(index=0, text="forty", token_ids=[1]))
        await seat.sees("runs on host-1-0", "forty")
        await seat.press("escape")
        await seat.sees("filter tenant=acme")
        await seat.press("escape")
        await seat.sees("of-globex")


async def test_contents_are_hidden_by_default(terminal: Terminal) -> None:
    await terminal.enqueue("secret", prompt="the password")
    async with terminal.seat(Access("", Role.ADMIN)) as seat:
        await seat.press("3")
        await seat.sees("secret")
        await seat.press("enter")
        text = await seat.sees("Input", "--show-contents")
        assert "the password" not in text


async def test_engines_and_parked_requests_have_detail_screens(terminal: Terminal) -> None:
    await terminal.register(state=EngineState.FAILED, error="out of memory\nin step 7", num_restarts=3)
    await terminal.park("dies", prompt="poison")
    async with terminal.seat() as seat:
        await seat.press("4")
        await seat.sees("failed", "! host-1-0: out of memory in step 7")
        await seat.press("enter")
        await seat.sees("engine host-1-0", "restarts", "Last error", "in step 7")
        await seat.press("escape", "5")
        await seat.sees("dies")
        await seat.press("enter")
        await seat.sees("parked request dies", "Traceback: <i>x</i>")
        await seat.press("end")
        await seat.sees("poison")


async def test_control_characters_and_markup_in_foreign_text_are_escaped(terminal: Terminal) -> None:
    await terminal.enqueue("r", tenant=EVIL, prompt=EVIL)
    async with terminal.seat() as seat:
        await seat.press("2")
        text = await seat.sees("[red]x[/] \\x1b[2J")
        assert "\\u202e[/bold]" in text
        await seat.press("3")
        await seat.sees("[red]x[/] \\x1b[2J")
        await seat.press("enter")
        await seat.press("end")
        await seat.sees("[red]x[/] \\x1b[2J\\x0d\\u202e[/bold]")
        assert not {"\x1b", "\r", "\u202e"} & set(seat.text)


async def test_filter_and_order(terminal: Terminal) -> None:
    for tenant, count in (("acme", 1), ("globex", 3), ("initech", 2)):
        for number in range(count):
            await terminal.enqueue(f"{tenant}-{number}", tenant=tenant)
    names = ("acme", "globex", "initech")

    def order(text: str) -> list[str]:
        return [word for line in text.splitlines() for word in line.split()[:1] if word in names]

    async with terminal.seat() as seat:
        await seat.press("2")
        await seat.until(lambda text: len(order(text)) == 3)
        await seat.press("s")
        await seat.until(lambda text: "TENANT▲" in text and order(text) == ["acme", "globex", "initech"])
        await seat.press("S")
        await seat.until(lambda text: "TENANT▼" in text and order(text) == ["initech", "globex", "acme"])
        await seat.press("s")
        await seat.until(lambda text: "WAITING▼" in text and order(text) == ["globex", "initech", "acme"])
        await seat.press("slash", *"EX", "enter")
        await seat.until(lambda text: order(text) == ["globex"] and "filter EX: 1 shown" in text)
        await seat.press("escape")
        await seat.until(lambda text: len(order(text)) == 3)
        await seat.press("3", "slash", *"state=failed", "enter")
        await seat.sees("shown: failed", "filter state=failed: 0 shown")
        await seat.press("slash", *"state=nonsense", "enter")
        await seat.sees("state=nonsense", "must be")
        await seat.press("q")


async def test_the_cursor_stays_on_its_row_when_rows_are_inserted_above(terminal: Terminal) -> None:
    for name in ("b", "c"):
        await terminal.park(f"{name}-dies")
    async with terminal.seat() as seat:
        await seat.press("5")
        await seat.sees("b-dies", "c-dies")
        await seat.press("s", "home", "down")
        await terminal.park("a-dies")
        await seat.sees("a-dies")
        await seat.press("r")
        await seat.sees("queue request c-dies again")


async def test_another_model_is_chosen_by_its_name(terminal: Terminal) -> None:
    await terminal.register("other [b]")
    async with terminal.seat() as seat:
        await seat.press("m")
        await seat.sees("tenants of which model?", "other [b]")
        await seat.press("j", "enter")
        await seat.sees("other [b]: open")


async def test_the_help_lists_the_keys_and_q_leaves(terminal: Terminal) -> None:
    async with terminal.seat() as seat:
        await seat.press("question_mark")
        text = await seat.sees("Keys", "pause/resume", "drain", "retry", "penstock audit")
        assert "╰" in text, "it fits on the screen"
        await seat.press("escape")
        await seat.sees("MODEL")
        await seat.press("q")
        async with asyncio.timeout(DEADLINE_S):
            while seat.app.is_running:
                await asyncio.sleep(0.01)


async def test_a_picture_of_it_loads_nothing_from_elsewhere(terminal: Terminal) -> None:
    await terminal.enqueue("waits", tenant="acme")
    svg = await picture(terminal.url, terminal.keys.namespace, ["2"], "acme")
    assert svg.startswith("<svg")
    assert "@font-face" not in svg
    assert "url(http" not in svg
