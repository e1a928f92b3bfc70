"""Random kills, stops, drains, cut connections, failovers and a Redis that is full or forgetful harm no request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from penstock.ops.lab.clusters.sentinel_trio import has_sentinel_mode


def run_chaos(tmp_path: Path, num_requests: int, num_events: int, *options: str, interval_tokens: int = 120) -> dict:
    report_path, log_path = tmp_path / "chaos.json", tmp_path / "worker.log"
    command = [sys.executable, "-m", "penstock.ops.cli", "chaos", "--requests", str(num_requests)]
    command += ["--events", str(num_events), "--interval-tokens", str(interval_tokens)]
    command += ["--json", str(report_path), "--log", str(log_path)]
    result = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-4000:]}"
    report = msgspec.json.decode(report_path.read_bytes())
    assert report["verdict"]["num_requests"] >= num_requests
    assert sum(report["events"].values()) >= num_events
    return report


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("warm_python")
def test_chaos(tmp_path: Path) -> None:
    """With guesses, of which the reference run, which is undisturbed, has other ones."""
    report = run_chaos(tmp_path, 18, 10, "--speculative", "ngram")
    assert len(report["recoveries_s"]) > 0
    assert report["events"]["reader killed"] >= 1


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("warm_python")
def test_chaos_with_ranks(tmp_path: Path) -> None:
    """The seed is one whose first victim is a rank."""
    ranks = ("--tensor-parallel-size", "2", "--engines", "2")
    # Two engines die of requests that three others would share; no request may be delivered too often.
    report = run_chaos(tmp_path, 10, 5, *ranks, "--seed", "2")
    assert report["events"]["kill rank"] >= 1


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("warm_python")
def test_chaos_with_sentinels(tmp_path: Path) -> None:
    """The seed is one with several failovers among its first events."""
    if not has_sentinel_mode(tmp_path):
        pytest.skip("the redis-server here cannot be a Sentinel")
    report = run_chaos(tmp_path, 10, 5, "--sentinel", "--seed", "5")
    assert report["events"]["kill primary"] >= 1


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("warm_python")
def test_chaos_with_lost_data(tmp_path: Path) -> None:
    """Chance decides whether a detached request runs at a loss, which ends it; all others continue."""
    report = run_chaos(tmp_path, 10, 6, "--lose-data", "--seed", "5")
    assert report["events"]["lose data"] >= 1


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("warm_python")
def test_chaos_with_shards(tmp_path: Path) -> None:
    """Each server dies now and then, and models move from one to another; the seed is one with moves at first."""
    report = run_chaos(tmp_path, 10, 6, "--shards", "2", "--engines", "4", "--seed", "3")
    assert report["events"]["move model"] >= 1


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("warm_python")
def test_chaos_with_several_models(tmp_path: Path) -> None:
    """Memory for one of three, each in two partitions. The seed is one whose first faults are those of swaps."""
    several = ("--models", "3", "--partitions", "2")
    report = run_chaos(tmp_path, 12, 3, *several, "--seed", "21", interval_tokens=60)
    assert report["swaps"]["num_swaps"] >= 3
    assert len(report["swaps"]["served_after_s"]) == 3
