"""Kill processes together with those that started them or that they have started."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
from contextlib import suppress

import psutil

_PR_SET_PDEATHSIG = 1
# Signals that a process causes itself. Any other signal was sent by another process.
_FAULTS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGSYS,
        signal.SIGPIPE,
        signal.SIGXCPU,
        signal.SIGXFSZ,
    }
)


def kill_process_tree(pid: int) -> None:
    """Kill ``pid``, its descendants, and the process group that it leads; do nothing if all have exited.

    Both are needed, because each misses some processes: a descendant may have left the group, and a process whose
    parent has died is no longer a descendant.
    """
    descendants: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(pid).children(recursive=True)
    kill_group(pid)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for descendant in descendants:
        with suppress(psutil.NoSuchProcess):
            descendant.kill()


def kill_group(leader: int) -> None:
    """Kill the processes of a group; do nothing if all have exited."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def die_with(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent ends; exit now if it already has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)


class Lifeline:
    """A pipe that ends with this process, or with ``close``. The process that inherits ``reader`` ends with it."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()

    def close(self) -> None:
        """End the process that inherited ``reader``. Further calls do nothing."""
        if self.reader >= 0:
            os.close(self.reader)
            os.close(self._writer)
            self.reader = -1


def die_with_lifeline(reader: int) -> None:
    """Make the kernel kill this process when the writer of its ``Lifeline`` ends; exit now if it already has.

    The writer need not be its parent. The process ends whatever it does: also if it is stopped, or if it computes and
    never returns to its interpreter.
    """
    fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)
    # The kernel reports only what happens from now on.
    hung_up = select.poll()
    hung_up.register(reader, 0)
    if hung_up.poll(0):
        os._exit(0)


def group_lives(group: int) -> bool:
    """Return whether any process of a group still runs, or is exiting but still holds its memory.

    A zombie does not count: in a container whose first process does not reap, orphans stay zombies for ever.
    """
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return any(_group_of(process.pid) == group and not is_zombie(process) for process in psutil.process_iter())


def is_zombie(process: psutil.Process) -> bool:
    """Return whether a process has exited, and is at most waiting to be reaped."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_own_fault(number: int) -> bool:
    """Return whether a process that was killed by this signal most likely caused it itself."""
    return number in _FAULTS


def stopped_child(pid: int) -> int | None:
    """Return the process id of a stopped child of ``pid``; None if none is stopped."""
    try:
        children = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return None
    return next((child.pid for child in children if is_stopped(child.pid)), None)


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal or by a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
