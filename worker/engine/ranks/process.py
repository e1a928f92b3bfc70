"""Starts the processes of ranks above 0, and describes how they end.

They are children of the engine core, in its session, or of the process that starts ranks on another host. If the parent
has a single thread, they are forked from it with its imported torch, which takes 0.1 s instead of seconds. The kernel
kills them when the parent ends, however it ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from typing import Protocol

from ....shared.process.log import log_options
from ...processes.forking import be_child
from ...processes.process_tree import is_own_fault, is_stopped
from .messages import RankAnswer, RankChannel, RankConfigure

PROGRAM = "penstock.worker.engine.ranks"


class Rank(Protocol):
    """A rank above 0 as the core sees it, on any host.

    Attributes:
        host: name of its host; "" for the core's.
        pidfd: descriptor that becomes readable when the rank has ended.
        clock_offset_ns: difference between this process's monotonic clock and the rank's.
        is_stopped: whether a signal has stopped it, as far as this host knows.
    """

    rank: int
    host: str
    pid: int
    pidfd: int
    channel: RankChannel
    clock_offset_ns: int

    @property
    def is_stopped(self) -> bool: ...

    def configure(self, message: RankConfigure) -> None:
        """Send its configuration. Raises ``OSError`` if it has ended."""
        ...

    def poll(self) -> int | None:
        """Return its exit status like ``Popen.returncode``; None while it runs."""
        ...

    def kill(self) -> None:
        """Send SIGKILL and wait for the end; do nothing if it has ended."""
        ...

    def close(self) -> None:
        """Close its channel and other descriptors after it has ended."""
        ...

    def describe_end(self) -> tuple[str, bool]:
        """Return how it ended, as a predicate for a message, and whether it was killed from outside."""
        ...


class RankChild:
    """A rank above 0 as its parent process sees it.

    Args:
        rank: number of the rank.
        sock: the rank's end of its channel, closed here once the process has it.
        rendezvous_fd: descriptor of the file through which the ranks of one host connect; -1 over several hosts.
        may_fork: whether the process may be forked from this one.
    """

    def __init__(self, rank: int, sock: socket.socket, rendezvous_fd: int, *, may_fork: bool) -> None:
        self.rank = rank
        self._returncode: int | None = None
        words = [
            "--fd",
            str(sock.fileno()),
            "--rendezvous-fd",
            str(rendezvous_fd),
            "--parent-pid",
            str(os.getpid()),
            "--rank",
            str(rank),
            *log_options(),
        ]
        descriptors = tuple(fd for fd in (sock.fileno(), rendezvous_fd) if fd >= 0)
        self.is_forked = may_fork and _has_one_thread()
        self.pid = _fork(words, descriptors) if self.is_forked else _spawn(words, descriptors)
        self.pidfd = os.pidfd_open(self.pid)
        sock.close()

    def poll(self) -> int | None:
        """Return its exit status like ``Popen.returncode``; None while it runs."""
        if self._returncode is None:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode

    def kill(self) -> None:
        """Send SIGKILL and wait for the end; do nothing if it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            with suppress(ChildProcessError):
                self._returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        """Close its pidfd after it has ended."""
        os.close(self.pidfd)

    def describe_end(self) -> tuple[str, bool]:
        """Return how it ended, as a predicate for a message, and whether it was killed from outside."""
        returncode = self.poll()
        return ("is running", False) if returncode is None else describe_exit(returncode)


class RankProcess(RankChild):
    """See ``Rank``: a child of the core. The arguments are those of ``RankChild``."""

    host = ""
    clock_offset_ns = 0

    def __init__(self, rank: int, rendezvous_fd: int, *, may_fork: bool) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(rank, theirs, rendezvous_fd, may_fork=may_fork)
        self.channel = RankChannel(ours, RankAnswer)

    @property
    def is_stopped(self) -> bool:
        return is_stopped(self.pid)

    def configure(self, message: RankConfigure) -> None:
        self.channel.send(message)

    def close(self) -> None:
        self.channel.close()
        super().close()


def describe_exit(returncode: int) -> tuple[str, bool]:
    """Return how a process ended, as ``RankChild.describe_end``."""
    if returncode >= 0:
        return f"ended with exit status {returncode}", False
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # a real-time signal
        name = f"signal {-returncode}"
    return f"was killed by {name}", not is_own_fault(-returncode)


def _has_one_thread() -> bool:
    """Return whether this process has one thread. A lock of another thread would stay locked in a forked child."""
    return len(os.listdir("/proc/self/task")) == 1


def _spawn(words: list[str], descriptors: tuple[int, ...]) -> int:
    command = [sys.executable, "-m", PROGRAM, *words]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)
    process.returncode = 0  # so that Popen does not wait for it, because ``poll`` and ``kill`` do by its id
    return process.pid


def _fork(words: list[str], descriptors: tuple[int, ...]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        be_child(partial(_become_rank, words, descriptors))
    return pid


def _become_rank(words: list[str], descriptors: tuple[int, ...]) -> int:
    """Run the rank's program in the forked child, after closing all other descriptors of the core."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in descriptors:
            with suppress(OSError):  # since the descriptor of the listing itself is closed already
                os.close(int(name))
    from .__main__ import run

    return run(words)
