"""What can be seen of a core that loads, without its help: a core that hangs cannot say so."""

from __future__ import annotations

import asyncio

import psutil

from ..core.client import CoreClient
from .watch import Activity, LoadWatch


async def until_hung(core: CoreClient, load_timeout_s: float) -> str:
    """Return what is found when ``core``, which loads, has stood still for so long; else never."""

    async def see() -> Activity | None:
        pid, entered_ns = core.pid, core.progress.read().phase_entered_ns
        return await asyncio.to_thread(core_activity, pid, entered_ns) if pid else None

    return await LoadWatch(see, load_timeout_s).run()


def core_activity(pid: int, entered_ns: int) -> Activity:
    """Look at the core ``pid`` and all that it has started; those that have gone meanwhile count for nothing.

    Args:
        entered_ns: when its phase began, as it tells itself.
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
    """What it has read and written: by calls, and what the kernel has fetched for memory that maps a file."""
    try:
        counters = process.io_counters()
    except (psutil.AccessDenied, AttributeError, NotImplementedError):  # somebody else's, or no such figures here
        return 0
    called = getattr(counters, "read_chars", 0) + getattr(counters, "write_chars", 0)
    return called + counters.read_bytes + counters.write_bytes
