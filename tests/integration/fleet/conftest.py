"""Fleets of the demo model, and what is left of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from penstock.worker.fleet.backend import AgentSpec
from penstock.worker.supervisor.fork_server import FORK_SERVER_VARIABLE

from ...conftest import DEMO_MODEL
from ...gate import Gate
from ..supervisor.conftest import DEADLINE_S, StartedWorker, wait_until


def processes_of(namespace: str) -> list[psutil.Process]:
    """All processes that were told of this namespace: agents' workers, and what those have started."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = process.environ().get("PENSTOCK_NAMESPACE") == namespace
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture
def spec(redis_url: str, namespace: str, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentSpec]:
    """Build the spec of an agent with a small engine, which heeds the gate. End what it has started at the end."""
    # Nobody is killed for taking long over what he hands back.
    monkeypatch.setattr("penstock.worker.fleet.agent.HAND_BACK_S", DEADLINE_S)
    options = {
        "PENSTOCK_MODEL": str(DEMO_MODEL),
        "PENSTOCK_SERVED_MODEL_NAME": "demo",
        "PENSTOCK_NAMESPACE": namespace,
        "PENSTOCK_REDIS_URL": redis_url,
        "PENSTOCK_DEVICE": "cpu",
        "PENSTOCK_THREADS": "1",
        "PENSTOCK_KV_CACHE_MEMORY": "64MiB",
        "PENSTOCK_LOG_FORMAT": "json",
        FORK_SERVER_VARIABLE: os.environ[FORK_SERVER_VARIABLE],
    }
    yield AgentSpec(worker_name="fleet", options=options)
    wait_until(lambda: not processes_of(namespace), f"left behind: {processes_of(namespace)}")


@pytest.fixture
def start_fleet(tmp_path: Path, gate: Gate) -> Iterator[Callable[..., StartedWorker]]:
    """Start a fleet as a process, with these options of `worker start`."""
    started: list[StartedWorker] = []

    def start(*options: str) -> StartedWorker:
        folder = tmp_path / f"fleet-{len(started)}"
        folder.mkdir()
        started.append(StartedWorker(folder, [*options, "--log-format", "json"]))
        return started[-1]

    yield start
    for fleet in started:
        fleet.destroy()
