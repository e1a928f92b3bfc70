"""Memory and cores of the host that this process may use, and how long a process waited for a core."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_VMSTAT = Path("/proc/vmstat")
_NS_PER_S = 1e9


def free_host_bytes() -> int:
    """Return the bytes of memory that this process may still allocate."""
    free = psutil.virtual_memory().available
    places = [(group, "memory.max", "memory.current") for group in _own_groups()]
    places.append((_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
    for group, limit_file, usage_file in places:
        limit, usage = _read_int(group / limit_file), _read_int(group / usage_file)
        if limit is not None and usage is not None:
            free = min(free, limit - usage + _reclaimable_bytes(group))
    return max(0, free)


def usable_cores() -> int:
    """Return the number of cores that this process may use: its affinity, limited by its control group's quota."""
    cores = len(os.sched_getaffinity(0))
    for group in _own_groups():
        try:
            quota, period = (group / "cpu.max").read_text().split()
            cores = min(cores, math.ceil(int(quota) / int(period)))
        except (OSError, ValueError):  # no such file, or no limit: "max"
            continue
    return max(1, cores)


def is_overloaded() -> bool:
    """Return whether more processes wanted a core than there are, on average of the last minute."""
    return os.getloadavg()[0] > (os.cpu_count() or 1)


def num_oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory, in this control group or on the host."""
    for path in (*(group / "memory.events" for group in _own_groups()), _VMSTAT):
        count = _read_field(path, "oom_kill")
        if count is not None:
            return count
    return 0


def _own_groups() -> list[Path]:
    """Return the folders of this process's cgroups (version 2), innermost first; in a container only the root."""
    try:
        lines = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        lines = []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    folder = _CGROUP / own
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(_CGROUP))]


def _read_int(path: Path) -> int | None:
    """Return the number in a control file; None if the file is absent or contains "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable_bytes(group: Path) -> int:
    """Return the bytes of file pages that count as used but are reclaimed under pressure."""
    return _read_field(group / "memory.stat", "inactive_file") or 0


def _read_field(path: Path, name: str) -> int | None:
    """Return the number after ``name`` in a file with such lines; None without one."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)


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
