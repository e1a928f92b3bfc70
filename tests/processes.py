"""Processes that tests look at, stop and kill, and that may end at any moment by themselves.

It asks psutil itself, and not ``worker.processes.process_tree``: in an event loop our own code may not read files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil

# How long a test waits for a thing that must happen; so long that only a test that hangs reaches it.
DEADLINE_S = 500.0


def is_alive(pid: int) -> bool:
    """Whether there is such a process; one that only waits to be reaped is none any more."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended, reaped or not, whoever has its id since."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def living(pids: Iterable[int]) -> list[psutil.Process]:
    """The processes of those ids that there are at this moment."""
    processes: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return processes


def kill_at_once(pids: Iterable[int]) -> None:
    """kill -9 of all, as a host dies: stopped first, none sees another one's end and leaves by itself before."""
    victims = [psutil.Process(pid) for pid in pids]
    for victim in victims:
        victim.suspend()
    for victim in victims:
        # A fork server kills a core as soon as its worker process has ended.
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()


def resume(processes: Iterable[psutil.Process]) -> None:
    """Resume the processes, except those that were killed meanwhile."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def listening_at(pid: int) -> set[str]:
    """Return the addresses at which a process listens for TCP connections, each as HOST:PORT."""
    sockets = psutil.Process(pid).net_connections(kind="tcp")
    return {f"{one.laddr.ip}:{one.laddr.port}" for one in sockets if one.status == psutil.CONN_LISTEN}
