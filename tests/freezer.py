"""Run a command whose processes stand still at random moments, as those of a busy host do: `make test-frozen`.

    python -m tests.freezer --seed 3 -- make test

A test that holds on any machine passes with that. The kernel freezes them (cgroup v2), so no signal is seen and a
process that a test has stopped stays stopped; but the clock runs, and leases and deadlines with it. Processes that
have just begun are frozen more often: others wait for their first actions, or do not. Needs Linux, and to be
root where the hierarchy belongs to root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

LOOK_INTERVAL_S = 0.015
# At most this many stand still at once, and one of four. More is a slower machine, and not another order of events.
MAX_FROZEN, ONE_OF = 5, 4
# Of those that begin, how many are frozen soon after; and when, at most.
SHARE_OF_YOUNG, YOUNG_S = 0.5, 0.5
# Squares of the draws: mostly short, sometimes as long as this.
MAX_FREEZE_S = 1.0


class Freezer:
    """Two groups of processes: those that run, and those that stand still.

    Args:
        root: a new folder of a cgroup v2 hierarchy.
        seed: of the draws. The processes to draw from differ from run to run.

    Attributes:
        num_freezes: so far.
    """

    def __init__(self, root: Path, seed: int) -> None:
        self.running, self._still = root / "running", root / "still"
        for group in (root, self.running, self._still):
            group.mkdir()
        (self._still / "cgroup.freeze").write_text("1")
        self._root = root
        self._random = random.Random(seed)
        self._seen: set[int] = set()
        self._freeze_at: dict[int, float] = {}
        self._thaw_at: dict[int, float] = {}
        self.num_freezes = 0

    def look(self, now: float) -> None:
        """Let go of those whose time is over, and freeze others."""
        running, still = _members(self.running), _members(self._still)
        for pid in running - self._seen:
            if self._random.random() < SHARE_OF_YOUNG:
                self._freeze_at[pid] = now + self._random.random() * YOUNG_S
        self._seen = running | still
        # One that was born there, of a parent that was just being frozen, is let go of at once.
        for pid in still:
            if self._thaw_at.get(pid, now) <= now:
                _move(pid, self.running)
        self._thaw_at = {pid: at for pid, at in self._thaw_at.items() if pid in still and at > now}
        chosen = [pid for pid, at in self._freeze_at.items() if at <= now]
        if running:
            chosen.append(self._random.choice(sorted(running)))
        for pid in chosen:
            self._freeze_at.pop(pid, None)
            self._freeze(pid, now)

    def _freeze(self, pid: int, now: float) -> None:
        most = min(MAX_FROZEN, (len(self._seen) + ONE_OF // 2) // ONE_OF)
        if len(self._thaw_at) < most and pid not in self._thaw_at and _move(pid, self._still):
            self._thaw_at[pid] = now + self._random.random() ** 2 * MAX_FREEZE_S
            self.num_freezes += 1

    def close(self) -> None:
        """Thaw all; groups with a living process stay."""
        (self._still / "cgroup.freeze").write_text("0")
        for group in (self.running, self._still, self._root):
            with contextlib.suppress(OSError):
                group.rmdir()


def _members(group: Path) -> set[int]:
    return {int(pid) for pid in (group / "cgroup.procs").read_text().split()}


def _move(pid: int, group: Path) -> bool:
    try:
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        return False  # it has ended
    return True


def hierarchy() -> Path | None:
    """Return the hierarchy in which groups of processes can be made and frozen; None without one."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2" and _can_freeze(Path(place)):
            return Path(place)
    return None


def _can_freeze(place: Path) -> bool:
    tried = place / f"penstock-tried-{os.getpid()}"
    try:
        tried.mkdir()
        try:
            return all(os.access(tried / name, os.W_OK) for name in ("cgroup.procs", "cgroup.freeze"))
        finally:
            tried.rmdir()
    except OSError:
        return False


def run(command: list[str], seed: int) -> int:
    """Run ``command``; return its exit status."""
    place = hierarchy()
    if place is None:
        sys.exit("there is no cgroup v2 hierarchy to write to: run this as root, on Linux 5.2 or later")
    with contextlib.closing(Freezer(place / f"penstock-tests-{os.getpid()}", seed)) as freezer:
        # A shell that has come there becomes the command, so all that it starts is born there.
        enter = 'echo $$ > "$0" && exec "$@"'
        process = subprocess.Popen(["sh", "-c", enter, freezer.running / "cgroup.procs", *command])
        while process.poll() is None:
            freezer.look(time.monotonic())
            time.sleep(LOOK_INTERVAL_S)
    sys.stderr.write(f"seed {seed}: processes were frozen {freezer.num_freezes} times\n")
    return process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command whose processes stand still at random moments.")
    parser.add_argument("--seed", type=int, default=None, help="of what is drawn (drawn itself)")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    # The terminal tells the command of Ctrl-C as well, and it is the command's to heed.
    signal.signal(signal.SIGINT, lambda *_: None)
    return run(options.command, random.randrange(1 << 16) if options.seed is None else options.seed)


if __name__ == "__main__":
    sys.exit(main())
