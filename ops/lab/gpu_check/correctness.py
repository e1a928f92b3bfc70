"""The tests of the kernels on the device, and those of the engine that are marked as wanting a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .notes import FILE_VARIABLE
from .plan import ROOT, Plan
from .program import run_program

_NUM_FAILURES_TOLD = 20
# Used if pytest-xdist is installed, because compiling for the shapes of every test takes most of the time.
_NUM_PROCESSES_PER_FILE = 2
_NUM_ENGINE_PROCESSES = 6


def check_correctness(plan: Plan, scratch: Path, limit_s: float) -> dict[str, Any]:
    """Run each test file in a process of its own, as an illegal access leaves a process without its device.

    Returns ``passed``, ``failed``, ``skipped``, per file the same, and the first failures with their reasons.
    """
    deadline = time.monotonic() + limit_s
    with ThreadPoolExecutor(plan.num_test_files_at_once) as pool:
        results = list(pool.map(lambda path: _run_file(path, plan, scratch, deadline), plan.test_files))
    total = Counter[str]()
    for file in results:
        total.update({name: file[name] for name in ("passed", "failed", "skipped")})
    errors = [f"{file['file']} {file['error']}" for file in results if file["error"] and not file["failed"]]
    if total["failed"]:
        errors.insert(0, f"{total['failed']} tests failed")
    if not total["passed"]:
        errors.append("no test passed")
    return {"error": "; ".join(errors) or None, **total, "files": results}


def check_engine(plan: Plan, scratch: Path, limit_s: float) -> dict[str, Any]:
    """Run the tests of ``plan.engine_tests`` that are marked "gpu", by the project's own settings.

    Returns as ``check_correctness``.
    """
    # A plugin of this name, where it is installed, warns of the processes, and warnings are errors here.
    options = ["-m", "gpu", "-p", "no:benchmark", "-c", str(ROOT / "pyproject.toml")]
    num_processes = min(_NUM_ENGINE_PROCESSES, len(plan.engine_tests))
    results = _run_pytest(ROOT / "tests", plan.engine_tests, options, num_processes, scratch, limit_s)
    error = f"{results['failed']} tests failed" if results["failed"] else results["error"]
    counts = {name: results[name] for name in ("passed", "failed", "skipped")}
    return {"error": error or (None if results["passed"] else "no test passed"), **counts, "files": [results]}


def _run_file(path: Path, plan: Plan, scratch: Path, deadline: float) -> dict[str, Any]:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return _summary(path, [], "not begun: no time was left", 0.0)
    # Nothing of the project's own settings: they name plugins that only its developers have. The fixtures are those of
    # the folder above, which holds the tests of all kernels.
    options = ["-c", "/dev/null", "--confcutdir", str(path.parents[1]), "--import-mode=importlib"]
    if plan.device == "cpu":
        environment = {"TRITON_INTERPRET": "1"}
        return _run_pytest(path, [path], [*options, "-m", "not gpu"], 0, scratch, left_s, environment)
    return _run_pytest(path, [path], options, _NUM_PROCESSES_PER_FILE, scratch, left_s)


def _run_pytest(
    name: Path,
    paths: Sequence[Path],
    options: Sequence[str],
    num_processes: int,
    scratch: Path,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run the tests of ``paths`` and return their results under the stem of ``name``; 0 processes for pytest's own."""
    started = time.monotonic()
    notes = scratch / f"{name.stem}.notes"
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    command += ["-p", "penstock.ops.lab.gpu_check.notes", *options]
    if num_processes and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(num_processes)]
    command += map(str, paths)
    variables = {FILE_VARIABLE: str(notes), **(environment or {})}
    ended = run_program(command, scratch / f"{name.stem}.log", limit_s, variables)
    lines = notes.read_text().splitlines() if notes.exists() else []
    return _summary(name, [json.loads(line) for line in lines], ended.error, time.monotonic() - started)


def _summary(path: Path, tests: list[dict[str, Any]], error: str, seconds: float) -> dict[str, Any]:
    outcomes = Counter(test["outcome"] for test in tests)
    failures = [test for test in tests if test["outcome"] == "failed"]
    return {
        "file": path.name,
        "passed": outcomes["passed"],
        "failed": len(failures),
        "skipped": outcomes["skipped"],
        "error": error or None,
        "seconds": round(seconds, 1),
        "failures": [
            {"test": t["test"].split("::", 1)[-1], "reason": t["reason"]} for t in failures[:_NUM_FAILURES_TOLD]
        ],
    }
