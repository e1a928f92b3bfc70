"""``penstock top`` where something is missing: Redis, a page, a terminal, the library."""

from __future__ import annotations

import asyncio
import io
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib.util import find_spec

import pytest

from penstock.ops import cli as penstock_cli
from penstock.ops.top.reader import Reader
from penstock.ops.top.screens import TablesScreen
from penstock.ops.top.tables import MODELS, TABLES
from penstock.ops.views.page import Page, Params, View
from penstock.ops.views.source import PageSnapshot
from penstock.shared.process.command_line import EXIT_FAILED, EXIT_USAGE

from ...redis_server import RedisServer
from .conftest import Terminal


async def test_values_stay_visible_with_their_age_while_redis_is_away(server: RedisServer, namespace: str) -> None:
    async with AsyncExitStack() as stack:
        terminal = Terminal(server.url, namespace, stack)
        stack.push_async_callback(terminal.connection.close)
        await terminal.register()
        await terminal.enqueue("waits")
        async with terminal.seat(retry_for_s=0.1) as seat:
            await seat.press("3")
            await seat.sees("waits", "0 running, 1 waiting")
            server.kill()
            text = await seat.sees("values of ", "waits", "1 waiting")
            assert "cannot be shown" not in text
            await seat.press("p", "1")  # keys go on
            await seat.sees("MODEL", "reading …")
            server.start()
            await asyncio.to_thread(server.wait_until_ready)
            await terminal.register()
            await seat.until(lambda text: "values of" not in text and "open" in text)


async def test_a_page_with_a_mistake_in_it_ends_nothing(
    terminal: Terminal, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(_: PageSnapshot, __: Params, ___: object) -> View:
        raise ZeroDivisionError

    broken = replace(MODELS, page=replace(MODELS.page, read=read))
    monkeypatch.setattr("penstock.ops.top.app.TABLES", (broken, *TABLES[1:]))
    async with terminal.seat() as seat:
        await seat.sees("this page cannot be shown; the file of --log-file has the reason")
        await seat.press("4")
        text = await seat.sees("host-1-0", "1 engine of 1 worker")
        assert "cannot be shown" not in text
    assert "top_page_failed" in log.getvalue()
    assert "ZeroDivisionError" in log.getvalue()


async def test_late_results_of_another_table_are_dropped(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    read, turned = Reader.read, asyncio.Event()

    async def read_and_turn(self: Reader, page: Page, params: Params) -> View | None:
        view = await read(self, page, params)
        if page is MODELS.page and isinstance(seat.app.screen, TablesScreen) and not turned.is_set():
            turned.set()
            seat.app.screen.action_table(3)
        return view

    async with terminal.seat() as seat:
        monkeypatch.setattr(Reader, "read", read_and_turn)
        await seat.sees("host-1-0", "1 engine of 1 worker")


def test_without_a_terminal_it_names_the_line_based_command(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert penstock_cli.main(["top", "--redis-url", redis_url]) == EXIT_USAGE
    assert "penstock queue show MODEL --watch" in capsys.readouterr().err


def test_without_its_library_it_names_the_package_to_install(
    redis_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "penstock.ops.cli.command_parts.find_spec", lambda name: None if name == "textual" else find_spec(name)
    )
    assert penstock_cli.main(["top", "--redis-url", redis_url]) == EXIT_FAILED
    assert "penstock top needs textual: pip install 'penstock-llm[top]'" in capsys.readouterr().err
