"""Real supervisors, on the CPU with the demo model, and their processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from penstock.shared.connection import CommandConnection

from ...conftest import DEMO_MODEL
from ...gate import Gate
from ...processes import DEADLINE_S, is_gone, living
from ...warm_python import LIGHT_PYTHON_VARIABLE, WarmProgram, light_python
from .stub_host import StartHost, StubHost, use_stub_workers


@pytest.fixture
async def start_host(
    commands: CommandConnection, redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StartHost]:
    use_stub_workers(monkeypatch, tmp_path)
    hosts: list[StubHost] = []

    async def start(num_engines: int = 1, **config: object) -> StubHost:
        config = {"redis_url": redis_url, "namespace": namespace, "heartbeat_interval_s": 0.1, **config}
        hosts.append(StubHost(commands, tmp_path, num_engines, config))
        await hosts[-1].until_ready()
        return hosts[-1]

    yield start
    for host in hosts:
        await host.destroy()


def wait_until(condition: Callable[[], object], what: str) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_at, what
        time.sleep(0.05)


class StartedWorker:
    """A running ``worker start``: its output and all its processes."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("w") as out, self._err.open("w") as err:
            command = [sys.executable, "-m", "penstock.worker.cli", "start", *arguments]
            start = WarmProgram if LIGHT_PYTHON_VARIABLE in os.environ else subprocess.Popen
            self.process = start(command, stdout=out, stderr=err)
        self._seen: dict[int, psutil.Process] = {}

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def events(self) -> list[dict[str, object]]:
        """The log lines so far, but for one that is being written."""
        lines = self.err.splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]

    def await_ready(self) -> None:
        wait_until(lambda: self.out or self.process.poll() is not None, "neither ready nor ended")
        assert self.out.startswith("ready: "), self.err
        self.note_processes()

    def await_event(self, event: str) -> dict[str, object]:
        """Return the first log line of that event, waiting for it."""
        wait_until(lambda: any(e["event"] == event for e in self.events), f"no {event!r} in {self.err}")
        return next(e for e in self.events if e["event"] == event)

    def await_end(self) -> int:
        """Return the exit status, having checked that no process is left."""
        self.note_processes()
        status = self.process.wait(DEADLINE_S)
        wait_until(self.all_gone, f"left behind: {self.left()}")
        return status

    def note_processes(self) -> None:
        """Remember the processes there are now, to look for them at the end."""
        # They are children of fork servers, which may be shared by many; one that has gone is not looked for.
        pids = {"core_started": "core_pid", "worker_started": "worker_pid"}
        forked = [int(str(event[pids[name]])) for event in self.events if (name := str(event["event"])) in pids]
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid).children(recursive=True)
            self._seen.update({process.pid: process for process in family})
        for process in living(forked):
            self._seen.setdefault(process.pid, process)

    def worker_processes(self) -> list[psutil.Process]:
        """The last of each engine, those that have ended left out, in the order of their engines."""
        started = [event for event in self.events if event["event"] == "worker_started"]
        last = {str(event["engine_id"]): int(str(event["worker_pid"])) for event in started}
        return living(pid for _, pid in sorted(last.items()))

    def newest_core(self) -> psutil.Process:
        """The engine core that was started last."""
        started = [event for event in self.events if event["event"] == "core_started"]
        return psutil.Process(int(str(started[-1]["core_pid"])))

    def left(self) -> list[psutil.Process]:
        return [process for process in self._seen.values() if not is_gone(process)]

    def all_gone(self) -> bool:
        return not self.left()

    def destroy(self) -> None:
        self.note_processes()
        self.process.kill()
        self.process.wait()
        for process in self.left():
            # Those of a worker that has gone end by themselves.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


StartWorker = Callable[..., StartedWorker]


@pytest.fixture
def start_worker(
    tmp_path: Path, redis_url: str, namespace: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StartWorker]:
    """Start a supervisor on this test's Redis and namespace, with more arguments; its cores heed the test's gate."""
    monkeypatch.setenv("PENSTOCK_REDIS_URL", redis_url)
    started: list[StartedWorker] = []

    def start(*arguments: str, model: Path = DEMO_MODEL) -> StartedWorker:
        folder = tmp_path / f"worker-{len(started)}"
        folder.mkdir()
        fixed = ["--model", str(model), "--namespace", namespace, "--log-format", "json"]
        # One thread: engines and tests share few cores, and torch's threads wait for each other by spinning.
        small = ["--kv-cache-memory", "64MiB", "--threads", "1", "--served-model-name", "demo"]
        started.append(StartedWorker(folder, [*fixed, *small, *arguments]))
        return started[-1]

    yield start
    for worker in started:
        worker.destroy()


def run_worker(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run another ``worker`` command to its end."""
    command = [light_python(), "-m", "penstock.worker.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=os.environ)
