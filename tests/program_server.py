"""The processes from which the programs of tests are forked, for all lanes (``warm_python.py`` asks them).

Each is forked before anything is imported, and imports the modules of its programs while the lanes' parent imports
the tests. A fork, and the end of its child, cost by the memory that both share: without the tests it is two thirds of
that, and without torch, which neither supervisors nor gateways need, a ninth.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from penstock.worker.processes.forking import be_child

from .forked_program import become_program
from .warm_python import LIGHT_PYTHON_VARIABLE, WARM_PYTHON_VARIABLE, address_in, write_script

# Standard streams, and the other inherited descriptors.
_MAX_DESCRIPTORS = 64
_READ_BYTES = 1 << 16

_SOURCES = Path(__file__).parent.parent
# Of worker processes, supervisors, gateways.
_WITHOUT_TORCH = ("ops/cli", "producer/gateway", "worker/cli", "worker/serving", "worker/supervisor")
_WITH_TORCH = ("kernels", "ops/cli", "ops/lab/bench", "ops/lab/chaos", "ops/lab/gpu_check", "ops/lab/survey", "worker")
# They bring large libraries along that few programs want.
_LEFT_OUT = ("ops/lab/bench/peers", "worker/fleet")


@dataclass(eq=False)
class _Asking:
    """A client that asks for a program, and that program once it runs."""

    socket: socket.socket
    request: bytearray = field(default_factory=bytearray)
    size: int | None = None
    descriptors: list[int] = field(default_factory=list)
    pid: int = 0
    pidfd: int = -1

    def read(self) -> bool:
        """Read on in the request; return whether it is whole.

        Raises:
            EOFError: no client asks any more.
        """
        if self.size is None:
            data, self.descriptors, _, _ = socket.recv_fds(self.socket, 4, _MAX_DESCRIPTORS)
            self.size = int.from_bytes(data, "big")
        else:
            data = self.socket.recv(_READ_BYTES)
            self.request += data
        if not data:
            raise EOFError
        return len(self.request) == self.size

    def close_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()

    def close(self) -> None:
        self.close_descriptors()
        self.socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)


class ProgramServer:
    """Server that forks programs, forwards signals to them, kills those without a client, and reports how they ended.

    Args:
        listener: a listening Unix stream socket.
        lifeline: a descriptor whose end means that no client will ask any more.
    """

    def __init__(self, listener: socket.socket, lifeline: int) -> None:
        self._listener = listener
        self._lifeline = lifeline
        self._asking: set[_Asking] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(lifeline, selectors.EVENT_READ, self._end_lifeline)
        self._is_open = True

    def run(self) -> int:
        """Serve until the lifeline ends and no program is left."""
        while self._is_open or self._asking:
            for key, _ in self._selector.select():
                key.data()
        return 0

    def _accept(self) -> None:
        asking = _Asking(self._listener.accept()[0])
        self._asking.add(asking)
        self._selector.register(asking.socket, selectors.EVENT_READ, partial(self._hear, asking))

    def _end_lifeline(self) -> None:
        self._selector.unregister(self._listener)
        self._selector.unregister(self._lifeline)
        self._listener.close()
        self._is_open = False

    def _hear(self, asking: _Asking) -> None:
        """Read the request, and afterwards the numbers of signals."""
        if asking not in self._asking:
            return  # its program has ended meanwhile
        try:
            if not asking.pid:
                if asking.read():
                    self._fork(asking)
                return
            number = asking.socket.recv(1)
        except (ConnectionResetError, EOFError):
            number = b""  # gone without having read that the program runs, or having asked
        if number:
            os.kill(asking.pid, number[0])
        elif asking.pid:
            self._selector.unregister(asking.socket)
            _kill(asking.pid)
        else:
            self._forget(asking)

    def _fork(self, asking: _Asking) -> None:
        asking.pid = os.fork()
        if asking.pid == 0:
            be_child(partial(self._become_program, asking))
        asking.pidfd = os.pidfd_open(asking.pid)
        asking.close_descriptors()
        with suppress(OSError):
            socket.send_fds(asking.socket, [f"{asking.pid} ".encode()], [asking.pidfd])
        self._selector.register(asking.pidfd, selectors.EVENT_READ, partial(self._end, asking))

    def _become_program(self, request: _Asking) -> int:
        # An end of a stream is seen when its last holder has let go of it.
        for other in self._asking - {request}:
            other.close()
        request.socket.close()
        self._listener.close()
        self._selector.close()
        os.close(self._lifeline)
        executable, words, folder, environment, numbers = json.loads(request.request)
        there = dict(zip(numbers, request.descriptors, strict=True))
        return become_program(executable, words, folder, environment, there)

    def _end(self, asking: _Asking) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(asking.pid, 0)[1])
        with suppress(OSError):
            asking.socket.sendall(str(status).encode())
        self._selector.unregister(asking.pidfd)
        self._forget(asking)

    def _forget(self, asking: _Asking) -> None:
        with suppress(KeyError):  # no client waits for it any more
            self._selector.unregister(asking.socket)
        self._asking.discard(asking)
        asking.close()


def _kill(pid: int) -> None:
    """Kill the program and its children; it has not been waited for, so the id is still its own."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # it has not come to have a group of its own


def serve_programs(config: pytest.Config) -> list[int]:
    """Fork one of programs of each kind for the run of ``config``, and have the environment tell where they are asked
    for. Where torch must not be imported there is one, of all programs.

    Returns:
        Descriptors that no child may hold: when the last holder of one has gone its server ends.
    """
    folder = tempfile.TemporaryDirectory(prefix="penstock-warm-")
    config.add_cleanup(folder.cleanup)
    kinds = {LIGHT_PYTHON_VARIABLE: _WITHOUT_TORCH, WARM_PYTHON_VARIABLE: _WITH_TORCH}
    if config.getoption("--without-torch") or config.getoption("--fast"):
        del kinds[WARM_PYTHON_VARIABLE]
    descriptors: list[int] = []
    for variable, parts in kinds.items():
        place = Path(folder.name) / variable.lower()
        place.mkdir()
        os.environ[variable] = str(write_script(place))
        descriptors.append(_start(address_in(place), parts, descriptors))
    os.environ.setdefault(WARM_PYTHON_VARIABLE, os.environ[LIGHT_PYTHON_VARIABLE])
    for descriptor in descriptors:
        config.add_cleanup(partial(os.close, descriptor))
    return descriptors


def _start(address: Path, parts: Sequence[str], others: Sequence[int]) -> int:
    # Whoever asks before all is imported waits.
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen(128)
    lifeline, write_end = os.pipe()
    if os.fork() == 0:
        for descriptor in (write_end, *others):
            os.close(descriptor)
        be_child(partial(_serve, listener, lifeline, parts))
    listener.close()
    os.close(lifeline)
    return write_end


def _serve(listener: socket.socket, lifeline: int, parts: Sequence[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _modules(parts):
            # The program that needs a missing library reports it.
            with suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()
    return ProgramServer(listener, lifeline).run()


def _modules(parts: Sequence[str]) -> Iterator[str]:
    """Return our modules in these folders that may be imported and are not programs."""
    left_out = [_SOURCES / name for name in _LEFT_OUT]
    for part in parts:
        for path in sorted((_SOURCES / part).rglob("*.py")):
            if path.stem not in ("__main__", "__init__") and not any(map(path.is_relative_to, left_out)):
                yield ".".join(["penstock", *path.relative_to(_SOURCES).with_suffix("").parts])
