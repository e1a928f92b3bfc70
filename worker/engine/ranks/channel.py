"""A blocking socket between the engine core and one of its ranks."""

from __future__ import annotations

import select
import socket
import struct
from typing import Any

import msgspec

from ...processes.ipc import SOCKET_BUFFER_BYTES

_LENGTH = struct.Struct("<Q")
_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """Return the bytes of a message, for ``RankChannel.send_bytes``."""
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


class RankChannel:
    """An end of the socket between the engine core and a rank.

    Args:
        sock: a connected stream socket.
        kind: the union of messages that the other end sends.
    """

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        sock.setblocking(True)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        self._socket = sock
        self._decoder = msgspec.msgpack.Decoder(kind)

    def send(self, message: Any) -> None:
        """Send one message.

        Raises:
            OSError: the other end has closed the socket.
        """
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Send the output of ``encode``, which is encoded once for all ranks. Raises as ``send``."""
        self._socket.sendall(data)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message; None if none arrives within ``timeout_s``.

        Raises:
            EOFError: the other end has closed the socket.
        """
        if timeout_s is not None and not select.select([self._socket], [], [], timeout_s)[0]:
            return None
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._decoder.decode(self._read(length))

    @property
    def is_closed(self) -> bool:
        """Whether the other end has closed the socket. Earlier messages from it may still be unread."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close this end; the other end notices."""
        self._socket.close()

    def fileno(self) -> int:
        """Return the file descriptor of the socket."""
        return self._socket.fileno()

    def _read(self, length: int) -> memoryview:
        data = bytearray(length)
        view, start = memoryview(data), 0
        while start < length:
            try:
                count = self._socket.recv_into(view[start:])
            except ConnectionResetError:
                count = 0
            if count == 0:
                raise EOFError("the other end has closed the ranks' socket")
            start += count
        return view
