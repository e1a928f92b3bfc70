"""``penstock top`` in this process, on a screen of 80 by 24, over a deployment of the tests' own."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from textual.pilot import Pilot

from penstock.ops.top.app import Top
from penstock.ops.views.access import Access
from penstock.ops.views.source import Source
from penstock.producer.control.secret_keys import Role
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.audit import Actor, Audit, AuditEntry, acting_as
from penstock.shared.process.log import configure_logging

from ...processes import DEADLINE_S
from ..dashboard.conftest import Site

SIZE = (80, 24)
ADMIN = Access("", Role.ADMIN, sees_contents=True)


class Seat:
    """Somebody at the terminal."""

    def __init__(self, app: Top, pilot: Pilot[None]) -> None:
        self.app = app
        self._pilot = pilot

    @property
    def text(self) -> str:
        """Return the text of the screen."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    async def press(self, *keys: str) -> None:
        await self._pilot.press(*keys)

    async def until(self, is_so: Callable[[str], bool]) -> str:
        """Wait for what the screen shows, and return it."""
        async with asyncio.timeout(DEADLINE_S):
            while not is_so(self.text):
                await self._pilot.pause(0.01)
        return self.text

    async def sees(self, *words: str) -> str:
        try:
            return await self.until(lambda text: all(word in text for word in words))
        except TimeoutError:
            raise AssertionError(f"{words} never stood on the screen:\n{self.text}") from None


class Terminal(Site):
    """A deployment, and seats before it."""

    async def entries(self) -> list[AuditEntry]:
        return (await Audit(self.connection, self.keys).read())[::-1]

    @asynccontextmanager
    async def seat(self, access: Access = ADMIN, size: tuple[int, int] = SIZE, **options: Any) -> AsyncIterator[Seat]:
        """Run it as ``run_top`` does, with a pilot in place of a terminal."""
        retry_for_s = options.pop("retry_for_s", 5.0)
        source = Source(self.url, CommandConnection(self.url, retry_for_s=retry_for_s), self.keys)
        await source.open()
        try:
            with acting_as(Actor(name="olga", via="top")):
                app = Top(source, access, **options)
                async with app.run_test(size=size) as pilot:
                    yield Seat(app, pilot)
        finally:
            await source.close()


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return what goes into --log-file; figures are read more often than once a second."""
    monkeypatch.setattr("penstock.ops.top.app.INTERVAL_S", 0.2)
    stream = io.StringIO()
    configure_logging("warning", "json", stream)
    return stream


@pytest.fixture
async def terminal(redis_url: str, namespace: str) -> AsyncIterator[Terminal]:
    async with AsyncExitStack() as stack:
        terminal = Terminal(redis_url, namespace, stack)
        stack.push_async_callback(terminal.connection.close)
        await terminal.register()
        yield terminal
