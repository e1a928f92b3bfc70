"""A process forked by a fork server: requested at a socket, signalled and awaited by descriptors."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Sequence

import msgspec

from .forking import ForkAnswer, Forked, ForkRequest, NotForked
from .ipc import FrameSplitter, frame

_READ_BYTES = 1 << 12


class NotForkedError(Exception):
    """The fork server is unreachable, does not answer or refuses; start the process without it."""


async def fork_process(
    fork_server: str, request: ForkRequest, descriptors: Sequence[int], timeout_s: float
) -> ForkedProcess:
    """Request a process at the socket ``fork_server``, and return it once it exists.

    Args:
        descriptors: file descriptors of ``request``, in its order; they stay open here.

    Raises:
        NotForkedError: the process was not forked; has the reason.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _fork(fork_server, frame(msgspec.msgpack.encode(request)), descriptors)
    except (OSError, TimeoutError) as error:
        raise NotForkedError(str(error) or f"no answer within {timeout_s:g} s") from error


async def _fork(fork_server: str, payload: bytes, descriptors: Sequence[int]) -> ForkedProcess:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(connection, fork_server)
        num_sent = socket.send_fds(connection, [payload], descriptors)
        await loop.sock_sendall(connection, payload[num_sent:])
        forked = ForkedProcess(connection)
        await forked.answered.wait()
        forked.raise_refusal()
        return forked
    except BaseException:
        loop.remove_reader(connection)
        connection.close()
        raise


class ForkedProcess:
    """A core or worker process whose parent is the fork server.

    Args:
        connection: connection on which it was requested. Its end kills a core, so it stays open with this object.

    Attributes:
        answered: set when the fork server has forked the process, refused, or exited.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.pid = 0
        self.answered = asyncio.Event()
        self._ended = asyncio.Event()
        self._returncode: int | None = None
        self._refusal = ""
        self._pidfd = -1
        self._connection = connection
        self._splitter = FrameSplitter()
        self._decoder = msgspec.msgpack.Decoder(ForkAnswer)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._read)

    def raise_refusal(self) -> None:
        """Raise ``NotForkedError`` if the process was not forked."""
        if self._refusal:
            raise NotForkedError(self._refusal)

    async def wait(self) -> int:
        """Wait for its exit and return the exit status as ``Popen.returncode``.

        A process that outlived its fork server is reported as killed, since its status is unknown.
        """
        await self._ended.wait()
        return -signal.SIGKILL if self._returncode is None else self._returncode

    def send_signal(self, number: int, /) -> None:
        """Send a signal, by descriptor, so that a reused process id is never signalled.

        Raises:
            ProcessLookupError: the process has exited.
        """
        if self._pidfd < 0:
            raise ProcessLookupError("the process has ended")
        signal.pidfd_send_signal(self._pidfd, number)

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._connection, _READ_BYTES, 1)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data, descriptors = b"", []
        if descriptors:
            self._pidfd = descriptors[0]
        if not data:
            self._lose_server()
            return
        for payload in self._splitter.feed(data):
            self._handle(self._decoder.decode(payload))

    def _handle(self, answer: ForkAnswer) -> None:
        if isinstance(answer, Forked):
            self.pid = answer.pid
        elif isinstance(answer, NotForked):
            self._refusal = answer.reason
        else:
            self._returncode = answer.returncode
            self._end()
        self.answered.set()

    def _lose_server(self) -> None:
        """Handle the exit of the fork server. Its child may continue, and its descriptor shows its exit."""
        self._loop.remove_reader(self._connection)
        if self._pidfd < 0:
            self._refusal = self._refusal or "the fork server ended"
            self.answered.set()
        else:
            self._loop.add_reader(self._pidfd, self._end)

    def _end(self) -> None:
        self._loop.remove_reader(self._connection)
        self._connection.close()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._ended.set()
