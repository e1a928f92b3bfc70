"""Random kills, stops, drains, cut connections and Redis restarts harms no request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest


@pytest.mark.timeout(480)
def test_chaos(tmp_path: Path) -> None:
    report_path, log_path = tmp_path / "chaos.json", tmp_path / "worker.log"
    command = [sys.executable, "-m", "penstock.ops.cli", "chaos", "--requests", "80", "--events", "20"]
    command += ["--interval", "1", "--json", str(report_path), "--log", str(log_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    report = msgspec.json.decode(report_path.read_bytes())
    assert report["verdict"]["num_requests"] >= 80
    assert sum(report["events"].values()) >= 20
    assert len(report["recoveries_s"]) > 0
