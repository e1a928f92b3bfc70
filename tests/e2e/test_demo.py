"""The commands for the first minutes, as a newcomer runs them: ``penstock demo`` and ``penstock run``."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import uuid

import psutil
import pytest

from penstock.ops.demo.run import MODEL
from penstock.shared.deployment.pretrained import SMOLLM2

from ..warm_python import light_python


def carrying(mark: str) -> set[int]:
    """Return the ids of processes that inherited the environment variable ``mark``: those that the demo started."""
    pids = set()
    for process in psutil.process_iter():
        try:
            if mark in process.environ():
                pids.add(process.pid)
        except psutil.Error:
            continue  # ended meanwhile, or a zombie, which has no environment
    return pids


def test_demo_answers_right_and_leaves_nothing_behind() -> None:
    mark = f"PENSTOCK_TEST_{uuid.uuid4().hex}"
    command = [sys.executable, "-m", "penstock.ops.cli", "demo", "--questions", "24", "--concurrency", "8"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, mark: "1"})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "TTFT" in result.stdout
    for style in ("demo", "digits", "downwards", "loud"):
        assert result.stdout.count(f"✓ {style}") == 3, result.stdout
    assert "tokens/s" in result.stdout
    numbers = [line.split("]")[0].strip("[ ") for line in result.stdout.splitlines() if "] …" in line]
    switches = sum(a != b for a, b in itertools.pairwise(numbers))
    assert switches > len(numbers) / 4, "the answers do not interleave"
    assert not carrying(mark)


@pytest.mark.skipif(not SMOLLM2.is_cached, reason="`make demo MODEL=smollm2` has not downloaded the model here")
def test_demo_of_a_pretrained_model_outlives_its_engine() -> None:
    mark = f"PENSTOCK_TEST_{uuid.uuid4().hex}"
    command = [sys.executable, "-m", "penstock.ops.cli", "demo", "--model", "smollm2"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, mark: "1"})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "kill -9 of the engine after" in result.stdout
    assert "3 of 3 texts are equal" in result.stdout
    assert '"age": 34' in result.stdout
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80
    assert not carrying(mark)


def test_run_loads_a_model_and_chats() -> None:
    command = [
        light_python(),
        "-m",
        "penstock.ops.cli",
        "run",
        str(MODEL),
        "--temperature",
        "0",
        "--worker-options",
        "--device cpu",
    ]
    lines = "spell 7:\nspell 12:\n"
    result = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert [line.strip() for line in result.stdout.splitlines()] == ["seven.", "twelve."]
    assert "\nstarting the engine …\n" in result.stderr


def test_run_says_in_the_last_line_why_the_worker_did_not_start() -> None:
    command = [light_python(), "-m", "penstock.ops.cli", "run", "/no/such/file.gguf"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: the worker did not start: model file '/no/such/file.gguf' does not exist")
