"""Other load on the machine during a measurement: CPU time of other processes and of other guests of the host.

It is the kernel's CPU time of the cores that we may use, minus that of our processes. Ours are this process, its
descendants, and detached servers (the embedded Redis), whose working directory is in the run's folder.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

import msgspec
import psutil

SAMPLE_INTERVAL_S = 1.0


class OtherLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the CPU time of ``num_cores`` in ``wall_s``: our processes', that of all others, stolen by the host."""

    ours_share: float
    others_share: float
    steal_share: float
    num_cores: int
    wall_s: float

    def __str__(self) -> str:
        return (
            f"meanwhile other processes took {self.others_share:.0%} of {self.num_cores} cores, "
            f"and the host {self.steal_share:.0%} (steal)"
        )


class CpuTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since some moment: of all cores together, busy for whomever, stolen, and busy for us."""

    total_s: float
    busy_s: float
    steal_s: float
    ours_s: float


def other_load(before: CpuTimes, after: CpuTimes, num_cores: int) -> OtherLoad | None:
    """Return the load of others between two times; None if the kernel counts no time, as in some sandboxes."""
    total_s = after.total_s - before.total_s
    if total_s <= 0:
        return None
    ours_s = after.ours_s - before.ours_s
    others_s = (after.busy_s - before.busy_s) - ours_s
    return OtherLoad(
        ours_share=ours_s / total_s,
        # Its clocks tick in hundredths, so the difference may come out a little below nothing.
        others_share=min(1.0, max(0.0, others_s / total_s)),
        steal_share=min(1.0, max(0.0, (after.steal_s - before.steal_s) / total_s)),
        num_cores=num_cores,
        wall_s=total_s / num_cores,
    )


class LoadWatch:
    """A ``with`` block whose other load is measured; afterwards it is in ``found``, or None if unknown.

    Args:
        folder: processes with a working directory in it are ours, whatever their parent.
    """

    def __init__(self, folder: Path) -> None:
        self.found: OtherLoad | None = None
        self._folder = folder.resolve()
        self._cores = sorted(os.sched_getaffinity(0))
        self._strangers: set[int] = set()
        # Last seen CPU seconds of servers that left us; they may be gone when the block ends.
        self._servers_s: dict[int, float] = {}
        self._is_over = threading.Event()
        self._sampler = threading.Thread(target=self._sample_for_ever, name="penstock-bench-load", daemon=True)

    def __enter__(self) -> LoadWatch:
        self._strangers = set(psutil.pids())
        self._before = self._read_cpu_times()
        self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._sampler.join()
        self._sample()
        self.found = other_load(self._before, self._read_cpu_times(), len(self._cores))

    def _read_cpu_times(self) -> CpuTimes:
        every = psutil.cpu_times(percpu=True)
        cores = [every[core] for core in self._cores if core < len(every)]
        busy_s = sum(_busy_s(core) for core in cores)
        steal_s = sum(getattr(core, "steal", 0.0) for core in cores)
        idle_s = sum(core.idle + getattr(core, "iowait", 0.0) for core in cores)
        times = os.times()
        ours_s = times.user + times.system + times.children_user + times.children_system
        ours_s += sum(_family_s(child) for child in psutil.Process().children(recursive=True))
        ours_s += sum(self._servers_s.values())
        return CpuTimes(total_s=busy_s + steal_s + idle_s, busy_s=busy_s, steal_s=steal_s, ours_s=ours_s)

    def _sample_for_ever(self) -> None:
        while not self._is_over.wait(SAMPLE_INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        """Look at the servers that have left us since the block began."""
        pids = set(psutil.pids())
        # A number is given again once its process is gone.
        self._strangers &= pids
        new = pids - self._strangers - self._servers_s.keys()
        mine = {child.pid for child in psutil.Process().children(recursive=True)} if new else set[int]()
        for pid in new - mine:
            if _works_in(pid, self._folder):
                self._servers_s[pid] = 0.0
            else:
                self._strangers.add(pid)
        for pid in self._servers_s.keys() & pids:
            try:
                self._servers_s[pid] = max(self._servers_s[pid], _family_s(psutil.Process(pid)))
            except psutil.NoSuchProcess:
                continue


def _busy_s(core: object) -> float:
    """Without the time of guests, which Linux counts as user's as well."""
    return sum(getattr(core, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))


def _family_s(process: psutil.Process) -> float:
    """CPU seconds of a process and of its children that have ended."""
    try:
        return sum(process.cpu_times()[:4])
    except psutil.Error:
        return 0.0


def _works_in(pid: int, folder: Path) -> bool:
    try:
        return Path(psutil.Process(pid).cwd()).is_relative_to(folder)
    except (psutil.Error, OSError):
        return False
