"""Whether anything comes or goes over a connection: what is large takes its time on a slow link."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from redis.asyncio.connection import AbstractConnection

try:
    import fcntl
    import termios
except ImportError:  # where there are none, what the system has still to send is not seen
    fcntl = termios = None


class Traffic:
    """What is on its way over ``connection``, seen from look to look."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._transport: Any = getattr(getattr(connection, "_writer", None), "transport", None)
        self._has_come = False
        self._unsent = 0

    def note_part(self) -> None:
        """Bytes have come that are no whole reply yet."""
        self._has_come = True

    def has_moved(self) -> bool:
        """Whether a part of a reply has come since this was asked last, or a part of what is to be sent has gone."""
        before, self._unsent = self._unsent, self._count_unsent()
        has_come, self._has_come = self._has_come, False
        return has_come or self._unsent < before

    def _count_unsent(self) -> int:
        """Bytes that the other end has not confirmed: the transport's, and those that the system holds for it."""
        if self._transport is None or self._transport.is_closing():
            return 0
        held = 0
        socket = self._transport.get_extra_info("socket")
        if fcntl is not None and termios is not None and socket is not None:
            with suppress(OSError):
                held = int.from_bytes(fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return self._transport.get_write_buffer_size() + held
