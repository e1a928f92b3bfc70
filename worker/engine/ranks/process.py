"""Starts the processes of ranks above 0, and knows how they end.

They are children of the engine core, in its session. Where it has imported torch and nothing of it runs in a thread
yet, they are forked from it, which takes a tenth of a second instead of seconds. The kernel kills them when the core
ends, whatever ends it.
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
from ...forked_child import be_child
from ...process_tree import is_own_fault
from .channel import RankChannel
from .messages import RankAnswer

PROGRAM = "penstock.worker.engine.ranks"


class RankProcess:
    """A rank above 0, and the core's end of its socket.

    Args:
        rank: its number.
        rendezvous_fd: of the file by which the ranks find each other.
        may_fork: nothing forbids that it is forked from this process.
    """

    def __init__(self, rank: int, rendezvous_fd: int, *, may_fork: bool) -> None:
        self.rank = rank
        self._returncode: int | None = None
        ours, theirs = socket.socketpair()
        words = [
            *("--fd", str(theirs.fileno()), "--rendezvous-fd", str(rendezvous_fd), "--core-pid", str(os.getpid())),
            *("--rank", str(rank), *log_options()),
        ]
        kept = (theirs.fileno(), rendezvous_fd)
        self.is_forked = may_fork and _is_alone()
        self.pid = _fork(words, kept) if self.is_forked else _spawn(words, kept)
        self.pidfd = os.pidfd_open(self.pid)
        theirs.close()
        self.channel = RankChannel(ours, RankAnswer)

    def poll(self) -> int | None:
        """Return its exit status as ``Popen.returncode``; None while it lives."""
        if self._returncode is None:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode

    def kill(self) -> None:
        """SIGKILL, and wait for its end; does nothing if it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            with suppress(ChildProcessError):
                self._returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        """Let go of what is held of it, once it has ended."""
        self.channel.close()
        os.close(self.pidfd)

    def describe_end(self) -> tuple[str, bool]:
        """How it ended, in words that go on after its name, and whether somebody outside did it."""
        returncode = self.poll()
        if returncode is None:
            return "lives", False
        if returncode >= 0:
            return f"ended with exit status {returncode}", False
        try:
            name = signal.Signals(-returncode).name
        except ValueError:  # a real-time signal
            name = f"signal {-returncode}"
        return f"was killed by {name}", not is_own_fault(-returncode)


def _is_alone() -> bool:
    """Whether this process has one thread: what another holds while it is forked is held for ever in the child."""
    return len(os.listdir("/proc/self/task")) == 1


def _spawn(words: list[str], kept: tuple[int, ...]) -> int:
    command = [sys.executable, "-m", PROGRAM, *words]
    # Its end is waited for by its id.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=kept)
    process.returncode = 0  # or it would be waited for once more when this object goes
    return process.pid


def _fork(words: list[str], kept: tuple[int, ...]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        be_child(partial(_become_rank, words, kept))
    return pid


def _become_rank(words: list[str], kept: tuple[int, ...]) -> int:
    """In the child: let go of everything that is the core's, and be what a started rank is."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with suppress(OSError):  # the one that lists them
                os.close(int(name))
    from .__main__ import run

    return run(words)
