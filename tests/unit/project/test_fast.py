"""Tests that run without torch have no torch, and start no engine core."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ... import forked_lanes
from ...fast import NEED_TORCH, SLOW, TESTS, WITHOUT_TORCH


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=TESTS.parent,
        # Not the options that this run was given: they would change the output.
        env={**os.environ, "PYTEST_ADDOPTS": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_excluded_tests_exist() -> None:
    assert [name for name in NEED_TORCH + SLOW if not (TESTS / name).exists()] == []


@pytest.mark.slow
def test_its_files_are_imported_without_torch(request: pytest.FixtureRequest) -> None:
    """Lanes are forked from who has imported all files, these first; else a collection imports them."""
    if request.config.getoption("--without-torch"):
        pytest.skip("this run is the one that it starts")
    if forked_lanes.brought_torch is not None:
        assert forked_lanes.brought_torch == []
        return
    chosen = collected()
    assert len(chosen) > 100
    assert not [name for name in chosen if name.startswith(NEED_TORCH)]


@pytest.mark.slow
def test_files_that_need_it_are_left_out() -> None:
    # A folder and a file of another. The conftest.py of a folder that is named is imported before anything is left out,
    # so it is one whose conftest.py does without.
    chosen = collected("tests/unit/bench", "tests/integration/fleet")
    assert "unit/bench/test_report.py" in chosen
    assert not [name for name in chosen if name.startswith(NEED_TORCH)]


def collected(*paths: str) -> set[str]:
    """Files of which a fresh Python without torch collects tests."""
    # The plugin of hypothesis would read the sources of all that is imported, and names of files are enough.
    options = ("-qq", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    result = run("-m", "pytest", "--without-torch", "--collect-only", *options, *paths)
    assert result.returncode == 0, result.stdout[-4000:]
    names = (line.partition(":")[0] for line in result.stdout.splitlines() if line.startswith("tests/"))
    return {name.removeprefix("tests/") for name in names}


def test_an_engine_core_does_not_start_in_it() -> None:
    result = run("-c", "import penstock.worker.engine.composition", PYTHONPATH=str(WITHOUT_TORCH))
    assert result.returncode == 1
    assert "this runs without torch" in result.stderr
