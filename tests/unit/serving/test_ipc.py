"""The worker process's end of the socket to its core."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvloop

from penstock.shared.messages.core import Shutdown
from penstock.worker.processes.ipc import WorkerChannel


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_channel_closed_while_opening_drops_its_messages(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """A worker process that gets SIGTERM while its core starts closes it so. The core sees the end."""

    async def give_up() -> bytes:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        channel = WorkerChannel(lambda _: None, lambda: None)
        opening = asyncio.create_task(channel.open(ours))
        is_made = channel.connection_made

        def made(transport: asyncio.BaseTransport) -> None:
            is_made(transport)
            opening.cancel()

        channel.connection_made = made
        with pytest.raises(asyncio.CancelledError):
            await opening
        channel.send(Shutdown())
        channel.close()
        with theirs:
            return await asyncio.to_thread(theirs.recv, 1)

    loop = make_loop()
    try:
        assert loop.run_until_complete(give_up()) == b""
    finally:
        loop.close()
