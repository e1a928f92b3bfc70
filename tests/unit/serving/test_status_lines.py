"""Status lines of a worker process to its supervisor, and those that it drops without a reader."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest

from penstock.shared.connection import CommandConnection
from penstock.shared.messages.supervision import EngineState
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.serving.reporting.heartbeat import Heartbeat, StatusLines

CONFIG = WorkerConfig(worker_id="w", engine_id="w-0", redis_url="", engine=EngineConfig(model="m"))


def test_a_heartbeat_goes_only_into_a_pipe_that_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that is stopped must not stop its workers: a long line might not fit into the rest of the pipe."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as pipe, open(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        heartbeat = Heartbeat(CONFIG, CommandConnection("redis://nowhere"))
        lines = StatusLines("w-0", heartbeat)
        lines.report(EngineState.STARTING)
        assert "heartbeat" not in json.loads(pipe.read(65_536)), "there is none yet"
        asyncio.run(heartbeat.refresh(0.0))
        lines.report(EngineState.READY)
        lines.report(EngineState.DRAINING)
        first, second = map(json.loads, filter(None, pipe.read(65_536).splitlines()))
        assert first["heartbeat"]["engine_id"] == "w-0"
        assert (second["state"], "heartbeat" in second) == ("draining", False)
        lines.report(EngineState.DRAINING)
        assert "heartbeat" in json.loads(pipe.read(65_536))
        monkeypatch.undo()


def test_a_status_follows_text_without_an_end_of_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that shows its progress prints such text, and the last status may hold the error."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as pipe, open(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        lines = StatusLines("w-0", Heartbeat(CONFIG, CommandConnection("redis://nowhere")))
        os.write(writing, b"loaded 10%")
        lines.report(EngineState.FAILED, message="there is no such model")
        text, status = pipe.read(65_536).splitlines()
        assert (text, json.loads(status)["message"]) == (b"loaded 10%", "there is no such model")
        monkeypatch.undo()
