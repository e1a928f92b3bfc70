"""Starts the processes of ranks above 0, and describes how they end.

They are children of the engine core, in its session. If the core has a single thread, they are forked from it with its
imported torch, which takes 0.1 s instead of seconds. The kernel kills them when the core ends, however it ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial

from ....shared.process.log import log_options
from ...processes.forking import be_child
from ...processes.process_tree import is_own_fault
from .messages import RankAnswer, RankChannel

PROGRAM = "penstock.worker.engine.ranks"


class RankProcess:
    """A rank above 0, and the core's end of its socket.

    Args:
        rank: number of the rank.
        rendezvous_fd: descriptor of the file through which the ranks connect.
        may_fork: whether the process may be forked from this one.
    """

    def __init__(self, rank: int, rendezvous_fd: int, *, may_fork: bool) -> None:
        self.rank = rank
        self._returncode: int | None = None
        ours, theirs = socket.socketpair()
        words = [
            "--fd",
            str(theirs.fileno()),
            "--rendezvous-fd",
            str(rendezvous_fd),
            "--core-pid",
            str(os.getpid()),
            "--rank",
            str(rank),
            *log_options(),
        ]
        descriptors = (theirs.fileno(), rendezvous_fd)
        self.is_forked = may_fork and _has_one_thread()
        self.pid = _fork(words, descriptors) if self.is_forked else _spawn(words, descriptors)
        self.pidfd = os.pidfd_open(self.pid)
        theirs.close()
        self.channel = RankChannel(ours, RankAnswer)

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
        """Close its socket and its pidfd after it has ended."""
        self.channel.close()
        os.close(self.pidfd)

    def describe_end(self) -> tuple[str, bool]:
        """Return how it ended, as a predicate for a message, and whether it was killed from outside."""
        returncode = self.poll()
        if returncode is None:
            return "is running", False
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
