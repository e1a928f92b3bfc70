"""Killing a process together with everything it started."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import psutil

# What a process does to itself. Any other signal was sent by somebody.
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
    """SIGKILL ``pid``, its descendants, and the process group it leads; does nothing if all are gone.

    Two ways of finding them, because each misses some: a descendant may have left the group, and one whose parent
    has died is a descendant no longer.
    """
    descendants: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(pid).children(recursive=True)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for descendant in descendants:
        with suppress(psutil.NoSuchProcess):
            descendant.kill()


def group_lives(group: int) -> bool:
    """Whether any process of a process group still runs, or is about to end but holds its memory yet.

    A zombie does not count: in a container whose first process reaps nobody, orphans stay zombies for ever.
    """
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return any(_group_of(process.pid) == group and not is_zombie(process) for process in psutil.process_iter())


def is_zombie(process: psutil.Process) -> bool:
    """Whether a process has ended and only waits to be reaped; True as well if it is gone."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_own_fault(number: int) -> bool:
    """Whether a process that died of this signal has sent it to itself, as far as one can tell."""
    return number in _FAULTS


def stopped_child(pid: int) -> int | None:
    """The process id of a child of ``pid`` that is stopped; None if none is."""
    try:
        children = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return None
    return next((child.pid for child in children if is_stopped(child.pid)), None)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, or by a debugger that holds it."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
