"""A command that starts Redis and workers leaves none of them behind, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from penstock.ops.local import worker as local_worker

from ..processes import DEADLINE_S, is_gone


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_demo_that_is_ended_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.ops.cli", "demo", "--questions", "4000"]
    with (tmp_path / "log").open("wb") as log:
        demo = subprocess.Popen(command, stdout=log, stderr=log)
    started: set[psutil.Process] = set()
    try:
        give_up_at = time.monotonic() + DEADLINE_S
        while "asking" not in (tmp_path / "log").read_text():
            assert time.monotonic() < give_up_at, "the demo does not begin"
            assert demo.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        started.update(psutil.Process(demo.pid).children(recursive=True))
        redis_servers = [one for one in psutil.process_iter(["cmdline"]) if _is_of_a_stack(one, started)]
        started.update(redis_servers)
        assert redis_servers
        demo.send_signal(number)
        demo.wait(DEADLINE_S)
        give_up_at = time.monotonic() + DEADLINE_S
        while left := [process for process in started if not is_gone(process)]:
            assert time.monotonic() < give_up_at, left
            time.sleep(0.05)
    finally:
        demo.kill()
        demo.wait()
        for process in started:
            if not is_gone(process):
                process.kill()


class EndsAtThisMoment(subprocess.Popen[str]):
    """A program that ends, and is waited for by another, after the first look at it."""

    def poll(self) -> int | None:
        if self.returncode is None:
            self.wait()
            return None
        return self.returncode


def test_a_worker_that_ends_while_it_is_stopped_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_worker, "start_program", lambda _, **options: EndsAtThisMoment(["true"], **options))
    worker = local_worker.LocalWorker("m", "redis://127.0.0.1:1", [], tmp_path / "log")
    worker.spawn()
    worker.stop()
    assert not worker.is_running


def _is_of_a_stack(process: psutil.Process, workers: set[psutil.Process]) -> bool:
    """Whether it is the Redis to which one of the workers was sent."""
    url = next((word for one in workers for word in _words(one) if word.startswith("unix://")), "")
    folder = url.removeprefix("unix://").rpartition("/")[0]
    return (
        bool(folder) and any("redis-server" in word for word in _words(process)) and folder in " ".join(_words(process))
    )


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
