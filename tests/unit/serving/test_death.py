"""The request to blame for the end of a core."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from penstock.worker.processes import host
from penstock.worker.processes.ipc import GROUP_BROKEN
from penstock.worker.serving.core.death import cause_of_exit, cause_of_stall


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_sent_by_another_process_is_an_outside_cause(number: signal.Signals) -> None:
    cause = cause_of_exit(-number, num_oom_kills=0)
    assert cause == (f"the engine core was killed by {number.name}", True)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL])
def test_a_fault_is_its_own(number: signal.Signals) -> None:
    cause = cause_of_exit(-number, num_oom_kills=0, trace="Fatal Python error: ...")
    assert cause == (f"the engine core was killed by {number.name}", False)


def test_a_kill_for_want_of_memory_is_its_own() -> None:
    cause = cause_of_exit(-signal.SIGKILL, num_oom_kills=1)
    assert "out of memory" in cause.reason
    assert not cause.is_external
    assert cause_of_exit(-signal.SIGTERM, num_oom_kills=1).is_external


def test_an_exit_is_its_own_and_named_after_the_exception() -> None:
    assert cause_of_exit(1) == ("the engine core ended with exit status 1", False)
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1\nRuntimeError: boom'
    assert cause_of_exit(1, trace=trace) == ("the engine core died of RuntimeError: boom", False)


def test_a_rank_killed_from_outside_is_no_request_s_fault() -> None:
    killed = "Traceback …\npenstock.worker.engine.ranks.team.RankKilledError: rank 1 (process 7) was killed by SIGKILL"
    words = "rank 1 (process 7) was killed by SIGKILL"
    assert cause_of_exit(1, trace=killed) == (f"the engine lost a rank: {words}", True)
    assert cause_of_exit(1, trace=killed, num_oom_kills=1) == (f"the engine ran out of memory: {words}", False)
    failed = "…\npenstock.worker.engine.ranks.team.RankLostError: rank 1 failed: RuntimeError: boom"
    assert cause_of_exit(1, trace=failed) == ("the engine lost a rank: rank 1 failed: RuntimeError: boom", False)


def test_a_stall_of_a_stopped_rank_is_an_outside_cause() -> None:
    sleeper = subprocess.Popen(["sleep", "100"])
    try:
        assert not cause_of_stall("it made no step", os.getpid()).is_external
        psutil.Process(sleeper.pid).suspend()
        while psutil.Process(sleeper.pid).status() != psutil.STATUS_STOPPED:
            pass  # it stops when it has its turn
        cause = cause_of_stall("it made no step", os.getpid())
    finally:
        sleeper.kill()
        sleeper.wait()
    assert cause == (f"it made no step: its rank of process id {sleeper.pid} was stopped by a signal", True)


def test_a_core_that_does_not_exit_is_killed_for_that_or_for_its_reported_error() -> None:
    assert cause_of_exit(None) == ("the engine core closed its channel and did not exit", False)
    assert cause_of_exit(None, trace="...\nRuntimeError: boom").reason == "the engine core died of RuntimeError: boom"


def test_a_real_time_signal_has_a_number() -> None:
    assert cause_of_exit(-40) == ("the engine core was killed by signal 40", True)


def test_the_stall_of_a_running_process_is_its_own() -> None:
    assert cause_of_stall("it made no step", os.getpid()) == ("it made no step", False)


def test_kills_are_counted_in_the_own_group_before_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CGROUP", "_OWN_CGROUP", "_VMSTAT"):
        monkeypatch.setattr(host, name, tmp_path / name)
    assert host.num_oom_kills() == 0
    (tmp_path / "_VMSTAT").write_text("pgfault 5\noom_kill 7\n")
    assert host.num_oom_kills() == 7
    group = tmp_path / "_CGROUP" / "engines"
    group.mkdir(parents=True)
    (tmp_path / "_OWN_CGROUP").write_text("0::/engines\n")
    (group / "memory.events").write_text("oom 3\noom_kill 2\noom_group_kill 0\n")
    assert host.num_oom_kills() == 2


def test_a_core_of_a_broken_group_is_not_blamed() -> None:
    trace = "Traceback\npenstock.shared.deployment.groups.errors.GroupBrokenError: a rank of the group is gone"
    cause = cause_of_exit(GROUP_BROKEN, trace=trace)
    assert cause.is_external
    assert "a rank of the group is gone" in cause.reason
    assert not cause_of_exit(1, trace=trace).is_external
