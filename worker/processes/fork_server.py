"""A process that has imported the modules of its children, and forks a child for each request at its socket.

Imports are most of the start time of an engine core and of a worker process, and forked children share their memory.
The server has one thread, uses no device and serves no inference requests. It exits when its standard input, which its
supervisor holds, is closed and its last child has exited.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Union

import msgspec

from .forking import FORK_VERSION, ChildExited, ForkAnswer, Forked, ForkRequest, NotForked, be_child
from .ipc import FrameSplitter, frame

_READ_BYTES = 1 << 16
# How long the next child of an engine waits until the previous one, which was killed, has exited and freed its memory.
_PREDECESSOR_TIMEOUT_S = 5.0
_STOPPING = (signal.SIGINT, signal.SIGTERM)

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Kind:
    """Kind of process that a server forks.

    Args:
        name: name for people.
        requests: types of its requests, and the number of file descriptors in each.
        become: function of a child, called with the request and the descriptors; returns the exit status.
        outlives_asker: whether the child notices the end of the requesting connection itself. Other children are killed
            by the server: only the parent can be sure that a process id is not reused.
        obstacle: returns the reason why this process cannot fork any more, or ""; called before each fork.
    """

    name: str
    requests: Mapping[type[ForkRequest], int]
    become: Callable[[Any, Sequence[int]], int]
    outlives_asker: bool
    obstacle: Callable[[], str] = lambda: ""


@dataclass(eq=False)
class _Connection:
    """Connection of a requesting process, and its child, if any."""

    socket: socket.socket
    splitter: FrameSplitter = field(default_factory=FrameSplitter)
    descriptors: list[int] = field(default_factory=list)
    request: ForkRequest | None = None
    pid: int = 0
    pidfd: int = -1

    def answer(self, answer: ForkAnswer, descriptors: list[int] | None = None) -> None:
        # The exit of a requesting process is noticed when its stream ends.
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.socket, [frame(_encoder.encode(answer))], descriptors or [])

    def close_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


class ForkServer:
    """Server of requests on ``listener`` until ``lifeline`` ends and no child is left.

    Args:
        listener: listening Unix stream socket.
        lifeline: descriptor whose end means that no more requests will arrive.
        kind: kind of process to fork.
        refusal: reason why no process can be forked; empty if it can.
    """

    def __init__(self, listener: socket.socket, lifeline: int, kind: Kind, refusal: str = "") -> None:
        self._kind = kind
        self._decoder: Any = msgspec.msgpack.Decoder(Union[tuple(kind.requests)])  # noqa: UP007  # of a variable
        self._listener: socket.socket | None = listener
        self._lifeline = lifeline
        self._refusal = refusal
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(lifeline, selectors.EVENT_READ, self._end_lifeline)
        self._connections: set[_Connection] = set()

    def run(self) -> None:
        """Serve until the lifeline has ended and no child is left."""
        while self._listener is not None or any(connection.pid for connection in self._connections):
            for key, _ in self._selector.select():
                key.data()

    def _accept(self) -> None:
        assert self._listener is not None
        accepted, _ = self._listener.accept()
        connection = _Connection(accepted)
        self._connections.add(connection)
        self._selector.register(accepted, selectors.EVENT_READ, lambda: self._read_request(connection))

    def _end_lifeline(self) -> None:
        self._selector.unregister(self._lifeline)
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _read_request(self, connection: _Connection) -> None:
        try:
            max_descriptors = max(self._kind.requests.values())
            data, descriptors, _, _ = socket.recv_fds(connection.socket, _READ_BYTES, max_descriptors)
        except ConnectionResetError:
            data, descriptors = b"", []
        connection.descriptors += descriptors
        if not data:
            self._lose(connection)
            return
        for payload in connection.splitter.feed(data):
            self._handle(connection, payload)

    def _lose(self, connection: _Connection) -> None:
        """Handle the end of a connection: kill its child, unless the child handles the end itself."""
        self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.close_descriptors()
        if not connection.pid:
            self._connections.discard(connection)
        elif not self._kind.outlives_asker:
            os.kill(connection.pid, signal.SIGKILL)  # it has not been waited for, so its id is not reused

    def _handle(self, connection: _Connection, payload: bytes) -> None:
        try:
            request = self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            connection.answer(NotForked(f"the fork server cannot decode the request: {error}"))
            return
        refusal, num_descriptors = self._refusal or self._kind.obstacle(), self._kind.requests[type(request)]
        if request.version != FORK_VERSION:
            refusal = f"the fork server speaks version {FORK_VERSION}, this process {request.version}"
        elif len(connection.descriptors) != num_descriptors:
            refusal = f"the fork server got {len(connection.descriptors)} descriptors of {num_descriptors}"
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
        """Kill the earlier processes of an engine. Returns False if one hangs in the kernel."""
        for connection in list(self._connections):
            if connection.request is None or connection.request.engine_id != engine_id or not connection.pid:
                continue
            os.kill(connection.pid, signal.SIGKILL)
            with selectors.DefaultSelector() as ending:
                ending.register(connection.pidfd, selectors.EVENT_READ)
                if not ending.select(_PREDECESSOR_TIMEOUT_S):
                    return False
            self._handle_exit(connection)
        return True

    def _fork(self, connection: _Connection, request: ForkRequest) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # Block signals until the child has its own handlers, so that a stop request ends it and is not ignored.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        pid = os.fork()
        if pid == 0:
            be_child(partial(self._become, request, connection.descriptors))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        connection.pid = pid
        connection.pidfd = os.pidfd_open(pid)
        connection.answer(Forked(pid), [connection.pidfd])
        self._selector.register(connection.pidfd, selectors.EVENT_READ, lambda: self._handle_exit(connection))

    def _handle_exit(self, connection: _Connection) -> None:
        _, status = os.waitpid(connection.pid, 0)
        self._selector.unregister(connection.pidfd)
        os.close(connection.pidfd)
        connection.pid, connection.pidfd = 0, -1
        if connection.socket.fileno() < 0:
            self._connections.discard(connection)
        else:
            connection.answer(ChildExited(os.waitstatus_to_exitcode(status)))

    def _become(self, request: ForkRequest, descriptors: list[int]) -> int:
        """Run in the child: close the server's descriptors, set up the process as a new one, and run its function."""
        own_descriptors = [os.dup(descriptor) for descriptor in descriptors]
        self._close_server_descriptors()
        os.setsid()
        os.chdir(request.folder)
        os.environ.clear()
        os.environb.update(request.environment)
        sys.path[:] = request.module_paths
        for number in _STOPPING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        return self._kind.become(request, own_descriptors)

    def _close_server_descriptors(self) -> None:
        """Close descriptors of the server, because a stream ends only when its last holder has closed it."""
        self._selector.close()
        if self._listener is not None:
            self._listener.close()
        for connection in self._connections:
            connection.socket.close()
            connection.close_descriptors()
            if connection.pidfd >= 0:
                os.close(connection.pidfd)


def ignore_stops() -> None:
    """Ignore stop signals, which reach the whole process group but concern the supervisor; children must drain."""
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)


def be_fork_server(listen_fd: int, kind: Kind, refusal: str = "") -> NoReturn:
    """Run the fork server on the inherited socket, after all imports."""
    # Exclude present objects from garbage collection, so that children do not write to the shared pages.
    gc.collect()
    gc.freeze()
    ForkServer(socket.socket(fileno=listen_fd), sys.stdin.fileno(), kind, refusal).run()
    # Without cleanup, because unused libraries log errors during it.
    os._exit(0)


def take_streams(streams: Sequence[int]) -> None:
    """Use ``streams`` as standard input, output and error."""
    for number, source in enumerate(streams):
        os.dup2(source, number)
        os.close(source)


def name_process(name: str) -> None:
    """Set the name that ``ps`` and ``top`` show; names longer than 15 bytes are cut."""
    with suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name)
