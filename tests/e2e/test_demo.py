"""The README's first command, as a newcomer runs it (its installation aside)."""

from __future__ import annotations

import itertools
import subprocess
import sys

import psutil


def ours() -> set[int]:
    """Processes of any Penstock deployment, or its Redis, on this machine."""
    found = set()
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if "penstock.worker" in line or "redis-server" in line:
            found.add(process.info["pid"])
    return found


def test_demo_answers_right_and_leaves_nothing_behind() -> None:
    before = ours()
    command = [sys.executable, "-m", "penstock.ops.cli", "demo", "--questions", "24", "--concurrency", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TTFT" in done.stdout
    assert "tokens/s" in done.stdout
    numbers = [line.split("]")[0].strip("[ ") for line in done.stdout.splitlines() if "] …" in line]
    switches = sum(a != b for a, b in itertools.pairwise(numbers))
    assert switches > len(numbers) / 4, "the answers do not interleave"
    started = {pid for pid in ours() - before if _has_ancestor_gone(pid)}
    assert not started


def _has_ancestor_gone(pid: int) -> bool:
    """A process the demo left behind has lost its parent; those of tests that run beside this one have not."""
    try:
        return psutil.Process(pid).ppid() == 1
    except psutil.NoSuchProcess:
        return False
