"""Starts the process of an engine core: forked by the fork server where there is one, else from nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Protocol

import msgspec
import structlog

from ....shared.child_process import start_child
from ...forking import FORK_VERSION, ForkAnswer, ForkCore, Forked, NotForked
from ...ipc import FrameSplitter, frame

# The first core of a host waits until the fork server has imported all, as it would for its own imports.
FORK_TIMEOUT_S = 120.0
_READ_BYTES = 1 << 12

log = structlog.get_logger(__name__)


class CoreProcess(Protocol):
    """A running core, whoever its parent is."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Return its exit status as ``Popen.returncode``, once it has ended."""
        ...

    def kill(self) -> None:
        """SIGKILL.

        Raises:
            ProcessLookupError: it has ended.
        """
        ...

    def send_signal(self, number: int, /) -> None:
        """Any signal.

        Raises:
            ProcessLookupError: it has ended.
        """
        ...


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a core is started with.

    Args:
        engine_id: whose core it is.
        visible_devices: its CUDA_VISIBLE_DEVICES; None leaves the environment alone.
        log_options: options of its command line that say how it logs.
        channel, progress, trace: descriptors that it inherits.
        module: the program of its core.
        python: the interpreter; empty: this one.
    """

    engine_id: str
    visible_devices: str | None
    log_options: Sequence[str]
    channel: int
    progress: int
    trace: int
    module: str
    python: str = ""

    def request(self) -> bytes:
        """What asks a fork server for this core, to be sent with ``channel``, ``progress``, ``trace``, out and err."""
        wanted = ForkCore(
            version=FORK_VERSION,
            engine_id=self.engine_id,
            environment=self.environment(),
            folder=os.getcwdb(),
            module_paths=sys.path,
            log_options=list(self.log_options),
        )
        return frame(msgspec.msgpack.encode(wanted))

    def environment(self) -> dict[bytes, bytes]:
        """This process's own, with the devices it may see."""
        environment = dict(os.environb)
        if self.visible_devices is not None:
            environment[b"CUDA_VISIBLE_DEVICES"] = self.visible_devices.encode()
        return environment


class _NotForkedError(Exception):
    """The fork server cannot do it; the core is spawned instead."""


async def start_core(launch: Launch, fork_server: str) -> CoreProcess:
    """Start a core as ``launch`` says; ``fork_server`` is the socket of one, or empty.

    A fork server that is away or refuses costs time, never the start.

    Raises:
        OSError: the host has no room for another process.
    """
    if fork_server:
        try:
            async with asyncio.timeout(FORK_TIMEOUT_S):
                process = await _fork(launch, fork_server)
        except (OSError, TimeoutError, _NotForkedError) as error:
            reason = str(error) or f"no answer within {FORK_TIMEOUT_S:g} s"
            log.warning("core_not_forked", reason=reason, remedy="it is started by itself, which takes longer")
        else:
            log.info("core_started", core_pid=process.pid, is_forked=True)
            return process
    process = await _spawn(launch)
    log.info("core_started", core_pid=process.pid, is_forked=False)
    return process


async def _spawn(launch: Launch) -> CoreProcess:
    inherited = (launch.channel, launch.progress, launch.trace)
    names = ("--fd", "--progress-fd", "--trace-fd")
    options = [word for pair in zip(names, map(str, inherited), strict=True) for word in pair]
    return await start_child(
        [launch.python or sys.executable, "-m", launch.module, *options, *launch.log_options],
        env=launch.environment(),
        pass_fds=inherited,
        stdin=asyncio.subprocess.DEVNULL,
    )


async def _fork(launch: Launch, fork_server: str) -> CoreProcess:
    payload = launch.request()
    descriptors = [launch.channel, launch.progress, launch.trace, 1, 2]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(connection, fork_server)
        num_sent = socket.send_fds(connection, [payload], descriptors)
        await loop.sock_sendall(connection, payload[num_sent:])
        forked = ForkedCore(connection)
        await forked.answered.wait()
        forked.raise_refusal()
        return forked
    except BaseException:
        loop.remove_reader(connection)
        connection.close()
        raise


class ForkedCore:
    """A core whose parent is the fork server.

    Args:
        connection: a connection on which it was asked for. Its end kills the core, so it is held as long as this.

    Attributes:
        answered: the fork server has forked, refused, or gone.
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
        """Raise what keeps it from being, if it is not."""
        if self._refusal:
            raise _NotForkedError(self._refusal)

    async def wait(self) -> int:
        """As ``CoreProcess``; a core that outlived its fork server is said to have been killed, as that was."""
        await self._ended.wait()
        return -signal.SIGKILL if self._returncode is None else self._returncode

    def kill(self) -> None:
        """As ``CoreProcess``."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int, /) -> None:
        """As ``CoreProcess``; the descriptor names this process even when its id is another's."""
        if self._pidfd < 0:
            raise ProcessLookupError("the core has ended")
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
            self._take(self._decoder.decode(payload))

    def _take(self, answer: ForkAnswer) -> None:
        if isinstance(answer, Forked):
            self.pid = answer.pid
        elif isinstance(answer, NotForked):
            self._refusal = answer.reason
        else:
            self._returncode = answer.returncode
            self._end()
        self.answered.set()

    def _lose_server(self) -> None:
        """The fork server is gone; the core may live on, and its descriptor tells of its end."""
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
