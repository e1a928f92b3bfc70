"""Memory and cores of the host that this process may use, within the limits of its control group."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_VMSTAT = Path("/proc/vmstat")


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
