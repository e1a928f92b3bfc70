"""What is large takes longer over a slow link than a connection may be silent: it comes and goes all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.shared import connection as connection_module
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.redis_access import replies

from ....processes import DEADLINE_S
from ....redis_server import RedisServer
from ..harness import until

# As much as asyncio reads at once: of less, it would hold some back that has left the other end.
CHUNK_BYTES = 1 << 18
LARGE = b"penstock" * (32 * CHUNK_BYTES // 8)
LOOKS_PER_CHUNK = 2
# Of the event loop, in which whoever has been sent something reads it.
TURNS = 10
# More than are made of the last chunks, which the link holds when nothing of them is left at either end.
MAX_SILENT_LOOKS = 12

needs_hiredis = pytest.mark.skipif(replies.hiredis is None, reason="without hiredis a part of a reply is not seen")


class SlowLink:
    """Stands between clients and a Redis, and counts time by the chunks that have passed: however slow Redis is.

    Attributes:
        is_open: a chunk passes when it is set.
        on_chunk: called when one has passed, and who waits for it has had the time to read it; whether Redis sent it.
    """

    def __init__(self, server: RedisServer, path: Path) -> None:
        self._target = server.url.removeprefix("unix://")
        self._path = path
        self.url = f"unix://{path}"
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.on_chunk: Callable[[bool], None] = lambda _: None
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
            await asyncio.gather(self._pass_on(reader, downstream, False), self._pass_on(upstream, writer, True))
        for end in (writer, downstream):
            end.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_reply: bool) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self.is_open.wait()
            writer.write(data)
            await writer.drain()
            for _ in range(TURNS):
                await asyncio.sleep(0)
            self.on_chunk(is_reply)
        writer.close()  # which ends the other direction as well


@pytest.fixture
async def link(server: RedisServer, tmp_path: Path) -> AsyncIterator[SlowLink]:
    link = SlowLink(server, tmp_path / "link.sock")
    await link.start()
    yield link
    await link.close()


@pytest.fixture
async def commands(link: SlowLink, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CommandConnection]:
    """It looks when a chunk has passed, and at no other time."""
    monkeypatch.setattr(connection_module, "LOOK_INTERVAL_S", 3600.0)
    monkeypatch.setattr(connection_module, "MAX_SILENT_LOOKS", MAX_SILENT_LOOKS)
    commands, num_looks = CommandConnection(link.url), 0
    await commands.open()

    def look(is_reply: bool) -> None:
        nonlocal num_looks
        for _ in range(LOOKS_PER_CHUNK):
            if (timer := commands._next_look) is not None:
                num_looks += 1
                timer.cancel()
                commands._look()

    link.on_chunk = look
    yield commands
    assert num_looks > 2 * MAX_SILENT_LOOKS, "it was no longer under way than it may be silent"
    await commands.close()


async def test_a_large_command_is_sent(link: SlowLink, commands: CommandConnection) -> None:
    async with asyncio.timeout(DEADLINE_S):
        assert await commands.execute("SET", "large", LARGE, retry=False) == b"OK"


@needs_hiredis
async def test_a_large_reply_is_read(link: SlowLink, commands: CommandConnection, server: RedisServer) -> None:
    direct = CommandConnection(server.url)
    await direct.execute("SET", "large", LARGE)
    await direct.close()
    async with asyncio.timeout(DEADLINE_S):
        assert await commands.execute("GET", "large", retry=False) == LARGE


@needs_hiredis
async def test_a_part_of_a_large_message_is_a_sign_of_life(link: SlowLink, server: RedisServer) -> None:
    direct, subscriber = CommandConnection(server.url), Subscriber(link.url)
    heard: list[bytes] = []
    subscriber.start()
    await subscriber.subscribe("channel", heard.append)
    for _ in range(2 * TURNS):  # what was told of the subscription has passed
        await asyncio.sleep(0)
    link.on_chunk = lambda is_reply: link.is_open.clear() if is_reply else None
    # As a ping begins, whose answer stands behind the message.
    subscriber._heard = False
    await direct.execute("PUBLISH", "channel", LARGE)

    async def is_alive() -> bool:
        return subscriber._heard

    async def has_all() -> bool:
        return heard == [LARGE]

    await until(is_alive)
    assert heard == []
    link.on_chunk = lambda _: None
    link.is_open.set()
    await until(has_all)
    await subscriber.close()
    await direct.close()
