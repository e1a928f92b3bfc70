"""``make test-frozen``: the processes that it freezes, and that it thaws all in the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ... import freezer
from ...freezer import hierarchy

needs_groups = pytest.mark.skipif(hierarchy() is None, reason="no cgroup v2 hierarchy to write to: needs root")

# Ends when it has seen another process of the command stand still, and run again.
WATCHES = """
import subprocess, sys, time
from pathlib import Path
sleeper = subprocess.Popen(["sleep", "1000"])
group = Path(f"/proc/{sleeper.pid}/cgroup")
for name in ("still", "running"):
    while not group.read_text().rstrip().endswith(name): time.sleep(0.005)
sleeper.kill()
sleeper.wait()
sys.exit(7)
"""


@needs_groups
def test_processes_stand_still_and_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    place = hierarchy()
    assert place is not None
    assert freezer.run([sys.executable, "-c", WATCHES], seed=5) == 7
    assert capsys.readouterr().err.startswith("seed 5: processes were frozen ")
    assert not (place / f"penstock-tests-{os.getpid()}").exists()


@needs_groups
def test_a_process_born_into_a_frozen_group_is_released(tmp_path: Path) -> None:
    place = hierarchy()
    assert place is not None
    groups = freezer.Freezer(place / f"penstock-{tmp_path.name}", seed=0)
    process = subprocess.Popen(["sleep", "1000"])
    try:
        (groups.running.with_name("still") / "cgroup.procs").write_text(str(process.pid))
        groups.look(0.0)
        assert Path(f"/proc/{process.pid}/cgroup").read_text().rstrip().endswith("running")
    finally:
        process.kill()
        process.wait()
        groups.close()


def test_missing_cgroups_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freezer, "hierarchy", lambda: None)
    with pytest.raises(SystemExit, match="run this as root"):
        freezer.run(["true"], seed=0)
