"""What Linux tells of processes that want a processor and have none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.worker.processes.host import waited_for_processor_s

from .conftest import wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel counts no waiting")

BUSY, ASLEEP = "while True: pass", "input()"
SHARED_S = 0.1


def test_processes_that_share_a_processor_count_as_waiting_and_sleepers_do_not() -> None:
    processor = min(os.sched_getaffinity(0))
    children = [
        subprocess.Popen([sys.executable, "-c", f"print(flush=True)\n{code}"], stdin=-1, stdout=-1)
        for code in (BUSY, BUSY, ASLEEP)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline()
            os.sched_setaffinity(child.pid, {processor})
        busy, asleep = [child.pid for child in children[:2]], children[2].pid
        wait_until(lambda: Path(f"/proc/{asleep}/stat").read_text().split()[2] == "S", "it does not sleep")
        before = [waited_for_processor_s(pid) for pid in (*busy, asleep)]
        for pid, had in zip(busy, before[:2], strict=True):
            wait_until(lambda pid=pid, had=had: waited_for_processor_s(pid) > had + SHARED_S, "no processor is shared")
        # Whatever wakes it for a moment, it wants none meanwhile.
        assert waited_for_processor_s(asleep) < before[2] + SHARED_S
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_an_ended_process_has_no_waiting_time() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert waited_for_processor_s(child.pid) == 0.0
