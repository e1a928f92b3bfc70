"""How long a process was ready to run and had no processor, which no watch may take for hanging."""

from __future__ import annotations

from pathlib import Path

_NS_PER_S = 1e9


def waited_for_processor_s(pid: int) -> float:
    """Return how long the first thread of ``pid`` has waited for a processor so far; it only ever grows.

    Counted by Linux: time in the run queue, behind other processes or for the quota of a container. The time in which
    a thread sleeps, waits for a lock or for a disk, or is stopped, does not count. 0 where the kernel does not tell,
    and of a process that has ended.
    """
    try:
        words = Path(f"/proc/{pid}/schedstat").read_bytes().split()
    except OSError:
        return 0.0
    # Source: Documentation/scheduler/sched-stats.rst: time on the processor, time in the run queue, number of turns.
    return int(words[1]) / _NS_PER_S if len(words) > 1 else 0.0
