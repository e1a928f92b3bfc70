"""A core that hangs while it loads is killed and started again: its weights are a FIFO that nobody writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import redis

from penstock.shared.keys import Keys
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.serving.process import EXIT_LOAD_TIMED_OUT

from ...conftest import DEMO_MODEL
from ...processes import is_alive
from ..gated_weights import GatedModel
from .conftest import DEADLINE_S, StartWorker, wait_until

# Long enough for a machine that is busy to give a core that loads some of its time.
LOAD_TIMEOUT_S = 10
HUNG = "the engine core hung while it loaded: for "


@pytest.fixture
def model(tmp_path: Path) -> GatedModel:
    return GatedModel(tmp_path / "model")


def test_a_core_that_hangs_is_restarted_until_it_loads(
    start_worker: StartWorker, model: GatedModel, redis_url: str, namespace: str
) -> None:
    worker = start_worker("--load-timeout", str(LOAD_TIMEOUT_S), model=model.folder)
    worker.await_ready()
    model.shut()
    worker.newest_core().kill()
    told = worker.await_event("load_timed_out")
    finding, hung = str(told["finding"]), int(str(told["core_pid"]))
    assert finding.startswith(HUNG)
    wait_until(lambda: any(finding == event.get("cause") for event in worker.events), "the supervisor says nothing")
    wait_until(lambda: not is_alive(hung), "the core that hung is there yet")
    lost = next(event for event in worker.events if event.get("cause") == finding)
    assert (lost["event"], lost["is_external"]) == ("engine_lost", False)
    # By now it may have hung once more, for a tenth of a second longer.
    listed = Keys(namespace).engine(str(lost["engine_id"]))
    with redis.Redis.from_url(redis_url, decode_responses=True) as commands:
        wait_until(lambda: HUNG in str(commands.get(listed)), "the heartbeat says nothing")
    model.open()
    worker.await_event("engine_restarted")
    worker.process.terminate()
    assert worker.await_end() == 0


HANGING = """
import os, subprocess
from pathlib import Path

child = subprocess.Popen(["sleep", "1000"])
folder = Path(__file__).parent
(folder / "pid").write_text(str(child.pid))
(folder / "fifo").read_bytes()
"""


def test_exit_status_and_report_name_the_load_timeout_and_child_processes_end(
    tmp_path: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers a core that was not forked, and the first start."""
    (tmp_path / "hanging_module.py").write_text(HANGING)
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engine = EngineConfig(model=str(DEMO_MODEL), served_model_name="demo", rpc_modules=("hanging_module",))
    config = WorkerConfig(
        worker_id="w",
        engine_id="w-0",
        redis_url=redis_url,
        namespace=namespace,
        engine=engine,
        load_timeout_s=LOAD_TIMEOUT_S,
    )
    command = [sys.executable, "-m", "penstock.worker.serving"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
        lines = [json.loads(line) for line in process.stdout if line.startswith(b"{")]
        assert process.wait(DEADLINE_S) == EXIT_LOAD_TIMED_OUT
    failure = next(line for line in lines if line.get("state") == "failed")
    assert failure["code"] == "load_timed_out"
    assert "hung while it loaded" in failure["message"]
    assert "hanging_module.py" in failure["trace"]
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(child), "what it started is there yet")
