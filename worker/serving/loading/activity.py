"""Observe a loading core from outside, because a core that hangs cannot report it."""

from __future__ import annotations

import asyncio

import psutil

from ..core.client import CoreClient
from .watch import Activity, LoadWatch


async def until_hung(core: CoreClient, load_timeout_s: float) -> str:
    """Return a description of the hang once ``core`` has made no progress for ``load_timeout_s`` while loading."""

    async def observe() -> Activity | None:
        pid, entered_ns = core.pid, core.progress.read().phase_entered_ns
        return await asyncio.to_thread(core_activity, pid, entered_ns) if pid else None

    return await LoadWatch(observe, load_timeout_s).run()


def core_activity(pid: int, entered_ns: int) -> Activity:
    """Return the activity of the core ``pid`` and its descendants; processes that have exited are skipped.

    Args:
        entered_ns: when the core entered its phase, as the core reports.
    """
    pids: set[int] = set()
    num_bytes = rss_bytes = 0
    for process in _family(pid):
        try:
            with process.oneshot():
                rss_bytes += process.memory_info().rss
                num_bytes += _moved_bytes(process)
        except psutil.Error:
            continue
        pids.add(process.pid)
    return Activity(entered_ns, num_bytes, rss_bytes, frozenset(pids))


def _family(pid: int) -> list[psutil.Process]:
    try:
        core = psutil.Process(pid)
        return [core, *core.children(recursive=True)]
    except psutil.Error:
        return []


def _moved_bytes(process: psutil.Process) -> int:
    """Return the bytes read and written: by system calls, and by the kernel for memory that maps a file."""
    try:
        counters = process.io_counters()
    except (psutil.AccessDenied, AttributeError, NotImplementedError):  # another user's, or no counters on this host
        return 0
    called = getattr(counters, "read_chars", 0) + getattr(counters, "write_chars", 0)
    return called + counters.read_bytes + counters.write_bytes
