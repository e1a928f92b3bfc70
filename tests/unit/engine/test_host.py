"""Memory and cores within the limits of a control group."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from penstock.worker.processes import host

MIB = 1 << 20


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty control group file system."""
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(host, "_OWN_CGROUP", tmp_path / "own")
    return tmp_path


def test_without_a_limit_the_host_decides(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = psutil.virtual_memory()  # which other processes change from one look to the next
    monkeypatch.setattr(psutil, "virtual_memory", lambda: now)
    assert host.free_host_bytes() == now.available
    assert host.usable_cores() == len(os.sched_getaffinity(0))
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("12345\n")
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert host.free_host_bytes() == now.available
    assert host.usable_cores() == len(os.sched_getaffinity(0))


def test_a_memory_limit_of_version_2(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text(f"{64 * MIB}\n")
    (cgroup / "memory.current").write_text(f"{60 * MIB}\n")
    assert host.free_host_bytes() == 4 * MIB
    (cgroup / "memory.stat").write_text(f"anon 5\ninactive_file {10 * MIB}\n")
    assert host.free_host_bytes() == 14 * MIB


def test_a_memory_limit_of_version_1(cgroup: Path) -> None:
    (cgroup / "memory").mkdir()
    (cgroup / "memory" / "memory.limit_in_bytes").write_text(f"{64 * MIB}\n")
    (cgroup / "memory" / "memory.usage_in_bytes").write_text(f"{65 * MIB}\n")
    assert host.free_host_bytes() == 0


@pytest.mark.parametrize(("quota", "cores"), [("50000", 1), ("100000", 1), ("150000", 2), ("99999900000", 8)])
def test_a_cpu_quota(cgroup: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (cgroup / "cpu.max").write_text(f"{quota} 100000\n")
    assert host.usable_cores() == cores


def test_the_tightest_of_nested_groups_counts(cgroup: Path) -> None:
    (cgroup / "own").write_text("0::/system.slice/worker.service\n")
    service = cgroup / "system.slice" / "worker.service"
    service.mkdir(parents=True)
    for group, limit in ((service, 64), (service.parent, 32)):
        (group / "memory.max").write_text(str(limit * MIB))
        (group / "memory.current").write_text(str(MIB))
    (service / "cpu.max").write_text("100000 100000")
    assert host.free_host_bytes() == 31 * MIB
    assert host.usable_cores() == 1
