"""A relay between a worker and its server: passes bytes both ways, and holds the server's bytes on request."""

from __future__ import annotations

import asyncio
import threading


class Relay:
    """Listens at ``port``; of each connection no more than ``hold_at`` said goes back until ``open``."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._num_bytes: int | None = None
        self._is_dropping = False
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        start = asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self._listener = asyncio.run_coroutine_threadsafe(start, self._loop).result(60)
        self.port: int = self._listener.sockets[0].getsockname()[1]

    def hold_at(self, num_bytes: int | None) -> None:
        """Let no connection have more bytes than this from now on; None lets all go on."""
        self._loop.call_soon_threadsafe(self._set, num_bytes)

    def drop(self) -> None:
        """Close the held connections, and hold no others: bytes that the server had sent ahead are lost."""
        self._loop.call_soon_threadsafe(self._set, None, True)

    def _set(self, num_bytes: int | None, is_dropping: bool = False) -> None:
        self._num_bytes, self._is_dropping = num_bytes, is_dropping
        self._changed.set()
        self._changed = asyncio.Event()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(task := asyncio.ensure_future(self._connect(reader, writer)))
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait([task])

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ways: list[asyncio.Task[None]] = []
        writers = [writer]
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
            writers.append(server_writer)
            ways = [
                asyncio.ensure_future(_copy(reader, server_writer)),
                asyncio.ensure_future(self._copy_held(server_reader, writer)),
            ]
            # Whoever closes first closes the other side, too: a caller that has gone away is an abort.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # No server: the caller sees a connection that is closed, as it would without a relay.
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for one in writers:
                one.close()

    async def _copy_held(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_sent = 0
        while data := await reader.read(256):
            while self._num_bytes is not None and num_sent + len(data) > self._num_bytes:
                await self._changed.wait()
                if self._is_dropping:
                    return
            num_sent += len(data)
            writer.write(data)
            await writer.drain()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
