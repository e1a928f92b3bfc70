"""The tests of the kernels on the device, and those of the engine that are marked as wanting a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .notes import FILE_VARIABLE
from .plan import ROOT, Plan
from .program import run_program

_NUM_FAILURES_TOLD = 20
# Where pytest-xdist is. Compiling for every test's shapes is what takes the time.
_NUM_PROCESSES_PER_FILE = 2
_NUM_ENGINE_PROCESSES = 6


def check_correctness(plan: Plan, scratch: Path, limit_s: float) -> dict[str, Any]:
    """Run each test file in a process of its own, as an illegal access leaves a process without its device.

    Returns ``passed``, ``failed``, ``skipped``, per file the same, and the first failures with their reasons.
    """
    deadline = time.monotonic() + limit_s
    with ThreadPoolExecutor(plan.num_test_files_at_once) as pool:
        found = list(pool.map(lambda path: _run_file(path, plan, scratch, deadline), plan.test_files))
    total = Counter[str]()
    for file in found:
        total.update({name: file[name] for name in ("passed", "failed", "skipped")})
    errors = [f"{file['file']} {file['error']}" for file in found if file["error"] and not file["failed"]]
    if total["failed"]:
        errors.insert(0, f"{total['failed']} tests failed")
    if not total["passed"]:
        errors.append("no test passed")
    return {"error": "; ".join(errors) or None, **total, "files": found}


def check_engine(plan: Plan, scratch: Path, limit_s: float) -> dict[str, Any]:
    """Run the tests of ``plan.engine_tests`` that are marked "gpu", by the project's own settings.

    Returns as ``check_correctness``.
    """
    # A plugin of this name, where it is installed, warns of the processes, and warnings are errors here.
    options = ["-m", "gpu", "-p", "no:benchmark", "-p", "no:cacheprovider", "-q", "--rootdir", str(ROOT)]
    options += ["-c", str(ROOT / "pyproject.toml"), "-p", "penstock.ops.gpu_check.notes"]
    if importlib.util.find_spec("xdist") is not None:
        options += ["-n", str(min(_NUM_ENGINE_PROCESSES, len(plan.engine_tests)))]
    notes, log = scratch / "engine-tests.notes", scratch / "engine-tests.log"
    command = [sys.executable, "-m", "pytest", *options, *map(str, plan.engine_tests)]
    started = time.monotonic()
    ended = run_program(command, log, limit_s, {FILE_VARIABLE: str(notes)})
    found = _summary(ROOT / "tests", _noted(notes), ended.error, time.monotonic() - started)
    error = f"{found['failed']} tests failed" if found["failed"] else found["error"]
    counts = {name: found[name] for name in ("passed", "failed", "skipped")}
    return {"error": error or (None if found["passed"] else "no test passed"), **counts, "files": [found]}


def _run_file(path: Path, plan: Plan, scratch: Path, deadline: float) -> dict[str, Any]:
    started = time.monotonic()
    if started >= deadline:
        return _summary(path, [], "not begun: no time was left", 0.0)
    notes = scratch / f"{path.stem}.notes"
    environment = {FILE_VARIABLE: str(notes)}
    # Nothing of the project's own settings: they name plugins that only its developers have. The fixtures are those of
    # the folder above, which holds the tests of all kernels.
    options = ["-c", "/dev/null", "--rootdir", str(ROOT), "--confcutdir", str(path.parents[1])]
    options += ["--import-mode=importlib", "-q", "-p", "no:cacheprovider", "-p", "penstock.ops.gpu_check.notes"]
    if plan.device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
        options += ["-m", "not gpu"]
    elif importlib.util.find_spec("xdist") is not None:
        options += ["-n", str(_NUM_PROCESSES_PER_FILE)]
    command = [sys.executable, "-m", "pytest", *options, str(path)]
    ended = run_program(command, scratch / f"{path.stem}.log", deadline - started, environment)
    return _summary(path, _noted(notes), ended.error, time.monotonic() - started)


def _noted(notes: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


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
