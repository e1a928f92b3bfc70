"""Measure how long a process was ready to run without a processor, which must not count as a hang."""

from __future__ import annotations

from pathlib import Path

_NS_PER_S = 1e9


def waited_for_processor_s(pid: int) -> float:
    """Return for how many seconds in total the first thread of ``pid`` has waited for a processor.

    Linux counts the time in the run queue, caused by other processes or by the quota of a container. Time in which a
    thread sleeps, waits for a lock or a disk, or is stopped does not count. Returns 0 if the kernel does not provide
    it, and for a process that has exited.
    """
    try:
        words = Path(f"/proc/{pid}/schedstat").read_bytes().split()
    except OSError:
        return 0.0
    # Source: Documentation/scheduler/sched-stats.rst: time on the processor, time in the run queue, number of turns.
    return int(words[1]) / _NS_PER_S if len(words) > 1 else 0.0
