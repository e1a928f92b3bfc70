"""What is large takes longer over a slow link than a connection may be silent: it comes and goes all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.shared import connection as connection_module
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.redis_access import replies
from penstock.shared.redis_access import subscriber as subscriber_module

from ....redis_server import RedisServer
from ..harness import until

# As much as asyncio reads at once: of less, it would hold some back that has left the other end.
CHUNK_BYTES = 1 << 18
LARGE = b"penstock" * (32 * CHUNK_BYTES // 8)
LOOKS_PER_CHUNK = 2
# More than the link takes for the last chunks, which it holds when nothing of them is left at either end.
MAX_SILENT_LOOKS = 12
PING_INTERVAL_S = 0.2

needs_hiredis = pytest.mark.skipif(replies.hiredis is None, reason="without hiredis a part of a reply is not seen")


class SlowLink:
    """Stands between clients and a Redis, at once until it ``is_slow``, and then with a chunk at a time.

    Attributes:
        next_chunks: lets one chunk pass, of either direction, each time that it is released.
    """

    def __init__(self, server: RedisServer, path: Path) -> None:
        self._target = server.url.removeprefix("unix://")
        self._path = path
        self.url = f"unix://{path}"
        self.is_slow = False
        self.next_chunks = asyncio.Semaphore(0)
        self._serving: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def close(self) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.append(task)
        upstream, downstream = await asyncio.open_unix_connection(self._target)
        with suppress(asyncio.CancelledError):  # by ``close``
            await asyncio.gather(self._pass_on(reader, downstream), self._pass_on(upstream, writer))
        for end in (writer, downstream):
            end.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if self.is_slow:
                await self.next_chunks.acquire()
            writer.write(data)
            await writer.drain()
        writer.close()  # which ends the other direction as well


@pytest.fixture
async def link(server: RedisServer, tmp_path: Path) -> AsyncIterator[SlowLink]:
    link = SlowLink(server, tmp_path / "link.sock")
    await link.start()
    yield link
    await link.close()


@pytest.fixture
async def commands(link: SlowLink, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CommandConnection]:
    """A chunk passes with every second look of it."""
    monkeypatch.setattr(connection_module, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(connection_module, "MAX_SILENT_LOOKS", MAX_SILENT_LOOKS)
    look, num_looks = CommandConnection._look, 0

    def counted(self: CommandConnection) -> None:
        nonlocal num_looks
        num_looks += 1
        if num_looks % LOOKS_PER_CHUNK == 0:
            link.next_chunks.release()
        look(self)

    monkeypatch.setattr(CommandConnection, "_look", counted)
    commands = CommandConnection(link.url)
    await commands.open()
    link.is_slow = True
    yield commands
    assert num_looks > 2 * MAX_SILENT_LOOKS, "it was no longer under way than it may be silent"
    await commands.close()


async def test_a_large_command_is_sent(link: SlowLink, commands: CommandConnection) -> None:
    async with asyncio.timeout(120):
        assert await commands.execute("SET", "large", LARGE, retry=False) == b"OK"


@needs_hiredis
async def test_a_large_reply_is_read(link: SlowLink, commands: CommandConnection, server: RedisServer) -> None:
    direct = CommandConnection(server.url)
    await direct.execute("SET", "large", LARGE)
    await direct.close()
    async with asyncio.timeout(120):
        assert await commands.execute("GET", "large", retry=False) == LARGE


@needs_hiredis
async def test_a_large_message_is_read(link: SlowLink, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber_module, "PING_INTERVAL_S", PING_INTERVAL_S)
    direct, subscriber = CommandConnection(server.url), Subscriber(link.url)
    heard: list[bytes] = []
    subscriber.start()
    await subscriber.subscribe("channel", heard.append)

    async def let_pass() -> None:
        # Answers to pings stand behind what passes meanwhile, and come too late.
        while True:
            await asyncio.sleep(PING_INTERVAL_S / 3)
            link.next_chunks.release()

    passing = asyncio.ensure_future(let_pass())
    link.is_slow = True
    await direct.execute("PUBLISH", "channel", LARGE)

    async def is_heard() -> bool:
        return bool(heard)

    await until(is_heard)
    assert heard == [LARGE]
    passing.cancel()
    await subscriber.close()
    await direct.close()
