"""What the host lets this process use: memory and cores, within the limits of its control group."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def free_host_bytes() -> int:
    """Memory that this process may still take."""
    free = psutil.virtual_memory().available
    places = [(group, "memory.max", "memory.current") for group in _own_groups()]
    places.append((_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
    for group, limit_file, usage_file in places:
        limit, usage = _read_int(group / limit_file), _read_int(group / usage_file)
        if limit is not None and usage is not None:
            free = min(free, limit - usage + _reclaimable_bytes(group / "memory.stat"))
    return max(0, free)


def usable_cores() -> int:
    """Cores that this process may keep busy: its affinity, and no more than the quota of its control group."""
    cores = len(os.sched_getaffinity(0))
    for group in _own_groups():
        try:
            quota, period = (group / "cpu.max").read_text().split()
            cores = min(cores, math.ceil(int(quota) / int(period)))
        except (OSError, ValueError):  # no such file, or no limit: "max"
            continue
    return max(1, cores)


def _own_groups() -> list[Path]:
    """Folders of this process's control groups of version 2, innermost first. In a container that is the root."""
    try:
        lines = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        lines = []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    folder = _CGROUP / own
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(_CGROUP))]


def _read_int(path: Path) -> int | None:
    """The number in a control file; None if it is absent or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable_bytes(stat_file: Path) -> int:
    """File pages that count as used but are given up under pressure."""
    try:
        lines = stat_file.read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return int(fields.get("inactive_file", 0))
