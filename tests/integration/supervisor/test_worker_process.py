"""A worker process that is waited for in a thread, while the loop that wanted it may end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from penstock.worker.supervisor import engine_process


def test_a_process_may_end_after_the_loop_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in its thread would end no process, and would be reported for an unrelated task."""
    stdin, stdout = subprocess.PIPE, subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=stdin, stdout=stdout
    ) as process:
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: process)
        raised: list[threading.ExceptHookArgs] = []
        monkeypatch.setattr(threading, "excepthook", raised.append)

        async def start() -> None:
            engine_process._Spawned("late")

        asyncio.run(start())
        (waiting,) = (thread for thread in threading.enumerate() if thread.name == "wait-late")
        assert process.stdin is not None
        process.stdin.close()
        waiting.join()
    assert not raised
