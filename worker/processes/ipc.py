"""Frames on the socket pair between a worker process and its engine core, and the core's exit status.

A frame is a 4-byte little-endian length and that many bytes of msgpack. The core's side is synchronous, because
its loop owns the thread; the worker's side is an asyncio protocol. The end of the stream shows the death of the
other side; the kernel reports it immediately, whatever the cause.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

import msgspec

from ...shared.messages.core import CoreInput, CoreOutput

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18
SOCKET_BUFFER_BYTES = 1 << 20
# It could not go on since another rank of its data-parallel group is gone: neither it nor its requests are to blame.
GROUP_BROKEN = 4


class FrameSplitter:
    """Splitter of a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that ``data`` completes."""
        buffer = self._buffer
        buffer += data
        frames: list[bytes] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            frames.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return frames


def frame(payload: bytes) -> bytes:
    """Prefix ``payload`` with its length."""
    return _LENGTH.pack(len(payload)) + payload


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets with buffers large enough that a burst does not block the core."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    return ours, theirs


class Undecodable(msgspec.Struct, frozen=True):
    """Placeholder for a frame that is not a ``CoreInput``; ``request_id`` is set for a request with a readable id."""

    reason: str
    request_id: str | None


class CoreChannel:
    """The engine core's end."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._splitter = FrameSplitter()
        self._decoder = msgspec.msgpack.Decoder(CoreInput)
        self._encoder = msgspec.msgpack.Encoder()

    def receive(self, timeout_s: float | None) -> list[Any]:
        """Return the ``CoreInput`` messages that have arrived, waiting up to ``timeout_s`` for the first bytes.

        None waits without a limit, 0 does not wait. A frame that does not decode is returned as ``Undecodable``, so
        that the messages next to it are not lost.

        Raises:
            EOFError: the worker process has exited.
        """
        messages: list[Any] = []
        while select.select([self._socket], [], [], timeout_s)[0]:
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise EOFError("the worker process closed the channel")
            messages += [self._decode(payload) for payload in self._splitter.feed(data)]
            timeout_s = 0
            if len(data) < _READ_BYTES:
                break
        return messages

    def send(self, message: Any) -> None:
        """Send one ``CoreOutput``; blocks while the worker has not read more than the socket's buffer."""
        self._socket.sendall(frame(self._encoder.encode(message)))

    def _decode(self, payload: bytes) -> Any:
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            return Undecodable(str(error), _request_id(payload))


def _request_id(payload: bytes) -> str | None:
    """Return the id in the bytes of an ``EngineCoreRequest`` that does not decode as a whole; None without one."""
    try:
        fields = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return None
    if isinstance(fields, list) and len(fields) > 2 and fields[0] == "add" and isinstance(fields[2], str):
        return fields[2]
    return None


class WorkerChannel(asyncio.Protocol):
    """The worker process's end: calls ``on_message`` for every ``CoreOutput`` and ``on_lost`` at the end."""

    def __init__(self, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._splitter = FrameSplitter()
        self._decoder = msgspec.msgpack.Decoder(CoreOutput)
        self._encoder = msgspec.msgpack.Encoder()
        self._transport: asyncio.Transport | None = None

    async def open(self, ours: socket.socket) -> None:
        """Send and receive on ``ours`` from now on."""
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)
        except BaseException:
            # Cancelled meanwhile: uvloop has closed the transport without a callback.
            self._transport = None
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        for payload in self._splitter.feed(data):
            self._on_message(self._decoder.decode(payload))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def send(self, message: Any) -> None:
        """Send one ``CoreInput``. A message to a dead core is dropped; its death is reported by ``on_lost``."""
        if self._transport is not None:
            self._transport.write(frame(self._encoder.encode(message)))

    def close(self) -> None:
        """Close our end; the core sees the end of the stream and exits."""
        if self._transport is not None:
            self._transport.close()
