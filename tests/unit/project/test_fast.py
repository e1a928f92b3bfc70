"""`make test-fast` holds what it promises: nothing in it has torch, so nothing in it starts an engine core."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ...fast import LEFT_OUT, TESTS, WITHOUT_TORCH


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=TESTS.parent,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_is_left_out_is_there() -> None:
    assert [name for name in LEFT_OUT if not (TESTS / name).exists()] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_its_files_are_imported_without_torch() -> None:
    done = run("-m", "pytest", "--fast", "--collect-only", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout[-4000:]
    chosen = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert len(chosen) > 100
    assert not [name for name in chosen if name.removeprefix("tests/").startswith(LEFT_OUT)]


def test_an_engine_core_does_not_start_in_it() -> None:
    done = run("-c", "import penstock.worker.engine.composition", PYTHONPATH=str(WITHOUT_TORCH))
    assert done.returncode == 1
    assert "make test-fast runs without torch" in done.stderr
