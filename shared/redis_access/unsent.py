"""Whether a connection still sends: large messages take time on a slow link."""

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


class Unsent:
    """Unsent bytes of ``connection``, compared from check to check."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._transport: Any = getattr(getattr(connection, "_writer", None), "transport", None)
        self._num_bytes = 0

    def has_shrunk(self) -> bool:
        """Whether there are fewer than at the last call."""
        before, self._num_bytes = self._num_bytes, self._count()
        return self._num_bytes < before

    def _count(self) -> int:
        """Return the bytes that the other end has not confirmed: those of the transport and of the system."""
        if self._transport is None or self._transport.is_closing():
            return 0
        num_bytes = 0
        socket = self._transport.get_extra_info("socket")
        if fcntl is not None and termios is not None and socket is not None:
            with suppress(OSError):
                num_bytes = int.from_bytes(fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return self._transport.get_write_buffer_size() + num_bytes
