"""A process forked by a fork server: the messages that request it, and how it is signalled and awaited by descriptors.

worker process, or its supervisor                                fork server
ForkCore + channel, progress, trace, lifeline, out, err
  | ForkWorker + in, out, err
  | ForkKeeper + lifeline, out, err, socket               ──▶
                                                          ◀──    Forked(pid) + pidfd | NotForked(reason)
                                                          ◀──    ChildExited(returncode)
(end of the stream: the server kills the core or keeper; a worker process exits when its standard input closes)

A core or keeper may outlive the server that has forked it. The end of its lifeline kills it, too.

Frames are those of ``ipc.py`` on a Unix socket, which sends the descriptors together with the first bytes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

import msgspec

from .ipc import FrameSplitter, frame

# Increased with any change below, because a process started after an upgrade may connect to an older server.
FORK_VERSION = 4
# Descriptors of ``ForkCore``, in this order: channel, progress, trace, lifeline, standard output, standard error.
NUM_DESCRIPTORS = 6
# Descriptors of ``ForkWorker``, in this order: standard input, output and error.
NUM_WORKER_DESCRIPTORS = 3
# Descriptors of ``ForkKeeper``, in this order: lifeline, standard output and error, listening socket.
NUM_KEEPER_DESCRIPTORS = 4
_READ_BYTES = 1 << 12


class ForkCore(msgspec.Struct, frozen=True, kw_only=True, tag="fork", array_like=True):
    """Request for an engine core.

    Args:
        version: ``FORK_VERSION`` of the requesting process.
        engine_id: id of the process. A process of the same id that still runs is killed and awaited first. So a standby
            has another id than the process that serves its engine.
        environment: whole environment, as bytes, since file names in it may not be valid text.
        folder: working directory.
        module_paths: ``sys.path``.
        log_options: logging options of the core's command line.
    """

    version: int
    engine_id: str
    environment: dict[bytes, bytes]
    folder: bytes
    module_paths: list[str]
    log_options: list[str]


class ForkKeeper(ForkCore, frozen=True, kw_only=True, tag="fork_keeper", array_like=True):
    """Request for a keeper of weights, which loads a model and forks cores that share its memory.

    Args:
        engine_config: ``EngineConfig`` as JSON.
    """

    engine_config: bytes


class ForkWorker(msgspec.Struct, frozen=True, kw_only=True, tag="fork_worker", array_like=True):
    """Request for a worker process, which reads its configuration from its standard input.

    Args:
        version: ``FORK_VERSION`` of the requesting process.
        engine_id: as in ``ForkCore``.
        environment: as in ``ForkCore``.
        folder: working directory.
        module_paths: ``sys.path``.
    """

    version: int
    engine_id: str
    environment: dict[bytes, bytes]
    folder: bytes
    module_paths: list[str]


class Forked(msgspec.Struct, frozen=True, tag="forked", array_like=True):
    """Reply for a forked process; the descriptor sent with it shows its exit."""

    pid: int


class NotForked(msgspec.Struct, frozen=True, tag="not_forked", array_like=True):
    """Reply if the process cannot be forked; the requesting process starts it itself."""

    reason: str


class ChildExited(msgspec.Struct, frozen=True, tag="exited", array_like=True):
    """Message after the exit of the process, with its ``Popen.returncode``."""

    returncode: int


ForkRequest = ForkCore | ForkKeeper | ForkWorker
ForkAnswer = Forked | NotForked | ChildExited


def workers_address(fork_server: str) -> str:
    """Return the socket for worker processes of a host whose socket for cores is ``fork_server``."""
    return f"{fork_server}-workers" if fork_server else ""


class NotForkedError(Exception):
    """The fork server is unreachable, does not answer or refuses; start the process without it."""


async def fork_process(
    fork_server: str, request: ForkRequest, descriptors: Sequence[int], timeout_s: float | None
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
        self._loop.add_reader(connection, self._read_answer)

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

    def _read_answer(self) -> None:
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
            self._release_descriptors()
        self.answered.set()

    def _lose_server(self) -> None:
        """Handle the exit of the fork server. Its child may continue, and its descriptor shows its exit."""
        self._loop.remove_reader(self._connection)
        if self._pidfd < 0:
            self._refusal = self._refusal or "the fork server ended"
            self.answered.set()
        else:
            self._loop.add_reader(self._pidfd, self._release_descriptors)

    def _release_descriptors(self) -> None:
        self._loop.remove_reader(self._connection)
        self._connection.close()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._ended.set()


def be_child(work: Callable[[], int]) -> NoReturn:
    """Run ``work`` and exit with the status that it returns or exits with; with 1 and a traceback if it raises.

    The parent's frames and exit handlers do not run in the child.
    """
    status = 1
    try:
        status = work()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
