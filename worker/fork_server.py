"""A process that has imported what its children are made of, and forks them for who asks at its socket.

Imports are most of the start of an engine core, and of a worker process; children that were forked share their memory.
The server has one thread, touches no device and serves no request. It ends when its standard input does, which its
supervisor holds, and its last child has.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import msgspec

from .forked_child import be_child
from .forking import FORK_VERSION, ChildExited, ForkAnswer, Forked, ForkRequest, NotForked
from .ipc import FrameSplitter, frame

_READ_BYTES = 1 << 16
# How long the next child of an engine waits for its last one, which was killed, to be gone and its memory with it.
_PREDECESSOR_TIMEOUT_S = 5.0
_STOPPING = (signal.SIGINT, signal.SIGTERM)

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Kind:
    """What a server forks.

    Args:
        name: in words.
        request: what asks for one.
        num_descriptors: that come with a request.
        become: what a child does, with what it was asked for by and those descriptors; returns its exit status.
        outlives_asker: whether it ends by itself when the connection does that asked for it. Any other is killed: no
            one else may, without the danger of hitting a stranger with the same process id.
    """

    name: str
    request: type[ForkRequest]
    num_descriptors: int
    become: Callable[[Any, Sequence[int]], int]
    outlives_asker: bool


@dataclass(eq=False)
class _Connection:
    """Who asks, and its child once it has one."""

    socket: socket.socket
    splitter: FrameSplitter = field(default_factory=FrameSplitter)
    descriptors: list[int] = field(default_factory=list)
    request: ForkRequest | None = None
    pid: int = 0
    pidfd: int = -1

    def answer(self, answer: ForkAnswer, descriptors: list[int] | None = None) -> None:
        # A worker process that is gone is noticed by the end of its stream.
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.socket, [frame(_encoder.encode(answer))], descriptors or [])

    def close_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


class ForkServer:
    """Answers who asks on ``listener`` until ``lifeline`` ends and no child is left.

    Args:
        listener: a listening Unix stream socket.
        lifeline: a descriptor whose end means that nobody will ask any more.
        kind: what it forks.
        refusal: why nothing can be forked; empty if it can.
    """

    def __init__(self, listener: socket.socket, lifeline: int, kind: Kind, refusal: str = "") -> None:
        self._kind = kind
        self._decoder = msgspec.msgpack.Decoder(kind.request)
        self._listener: socket.socket | None = listener
        self._lifeline = lifeline
        self._refusal = refusal
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(lifeline, selectors.EVENT_READ, self._end_lifeline)
        self._connections: set[_Connection] = set()

    def run(self) -> None:
        """Serve until there is nothing left to serve."""
        while self._listener is not None or any(connection.pid for connection in self._connections):
            for key, _ in self._selector.select():
                key.data()

    def _accept(self) -> None:
        assert self._listener is not None
        accepted, _ = self._listener.accept()
        connection = _Connection(accepted)
        self._connections.add(connection)
        self._selector.register(accepted, selectors.EVENT_READ, lambda: self._read(connection))

    def _end_lifeline(self) -> None:
        self._selector.unregister(self._lifeline)
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _read(self, connection: _Connection) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(connection.socket, _READ_BYTES, self._kind.num_descriptors)
        except ConnectionResetError:
            data, descriptors = b"", []
        connection.descriptors += descriptors
        if not data:
            self._lose(connection)
            return
        for payload in connection.splitter.feed(data):
            self._take(connection, payload)

    def _lose(self, connection: _Connection) -> None:
        """Who asked is gone, or has what it wanted: a child that does not outlive it is not wanted any more."""
        self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.close_descriptors()
        if not connection.pid:
            self._connections.discard(connection)
        elif not self._kind.outlives_asker:
            os.kill(connection.pid, signal.SIGKILL)  # it has not been waited for, so the id is still its own

    def _take(self, connection: _Connection, payload: bytes) -> None:
        try:
            request = self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            connection.answer(NotForked(f"the fork server cannot read what it is asked for: {error}"))
            return
        refusal = self._refusal
        if request.version != FORK_VERSION:
            refusal = f"the fork server speaks version {FORK_VERSION}, this process {request.version}"
        elif len(connection.descriptors) != self._kind.num_descriptors:
            refusal = f"the fork server got {len(connection.descriptors)} descriptors of {self._kind.num_descriptors}"
        elif connection.request is not None:
            refusal = f"a connection is for one {self._kind.name}"
        if not refusal and not self._end_predecessors(request.engine_id):
            refusal = f"the engine's last {self._kind.name} does not end"
        if refusal:
            connection.answer(NotForked(refusal))
        else:
            connection.request = request
            self._fork(connection, request)
        connection.close_descriptors()

    def _end_predecessors(self, engine_id: str) -> bool:
        """Kill what is left of an engine's earlier lives; False if one hangs in the kernel."""
        for connection in list(self._connections):
            if connection.request is None or connection.request.engine_id != engine_id or not connection.pid:
                continue
            os.kill(connection.pid, signal.SIGKILL)
            with selectors.DefaultSelector() as ending:
                ending.register(connection.pidfd, selectors.EVENT_READ)
                if not ending.select(_PREDECESSOR_TIMEOUT_S):
                    return False
            self._bury(connection)
        return True

    def _fork(self, connection: _Connection, request: ForkRequest) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # A child that is told to stop before it heeds that is to end by it, as one that was started; not to ignore it.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        pid = os.fork()
        if pid == 0:
            be_child(partial(self._become, request, connection.descriptors))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        connection.pid = pid
        connection.pidfd = os.pidfd_open(pid)
        connection.answer(Forked(pid), [connection.pidfd])
        self._selector.register(connection.pidfd, selectors.EVENT_READ, lambda: self._bury(connection))

    def _bury(self, connection: _Connection) -> None:
        _, status = os.waitpid(connection.pid, 0)
        self._selector.unregister(connection.pidfd)
        os.close(connection.pidfd)
        connection.pid, connection.pidfd = 0, -1
        if connection.socket.fileno() < 0:
            self._connections.discard(connection)
        else:
            connection.answer(ChildExited(os.waitstatus_to_exitcode(status)))

    def _become(self, request: ForkRequest, descriptors: list[int]) -> int:
        """In the child: let go of everything that is the server's, and be what a started one is."""
        kept = [os.dup(descriptor) for descriptor in descriptors]
        self._let_go()
        os.setsid()
        os.chdir(request.folder)
        os.environ.clear()
        os.environb.update(request.environment)
        sys.path[:] = request.module_paths
        for number in _STOPPING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        return self._kind.become(request, kept)

    def _let_go(self) -> None:
        """Close what only the server may hold: an end of a stream is seen when its last holder has gone."""
        self._selector.close()
        if self._listener is not None:
            self._listener.close()
        for connection in self._connections:
            connection.socket.close()
            connection.close_descriptors()
            if connection.pidfd >= 0:
                os.close(connection.pidfd)


def ignore_stops() -> None:
    """Outlive whoever stops a whole process group: its supervisor is meant, and children finish what runs."""
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)


def be_fork_server(listen_fd: int, kind: Kind, refusal: str = "") -> NoReturn:
    """Serve on the inherited socket, now that everything is imported."""
    # What is here now stays, and its pages stay shared: no collector of a child writes into them.
    gc.collect()
    gc.freeze()
    ForkServer(socket.socket(fileno=listen_fd), sys.stdin.fileno(), kind, refusal).run()
    # Nothing here wants to be taken down in order, and libraries complain when they are, unused.
    os._exit(0)


def take_streams(streams: Sequence[int]) -> None:
    """Make descriptors the standard input, output and error."""
    for number, source in enumerate(streams):
        os.dup2(source, number)
        os.close(source)


def name_process(name: str) -> None:
    """What ``ps`` and ``top`` show; a name of more than 15 bytes is cut."""
    with suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name)
