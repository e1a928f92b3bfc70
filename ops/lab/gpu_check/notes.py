"""A plugin of pytest: writes a line of JSON per finished test, so that results survive a crash or a time limit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

FILE_VARIABLE = "PENSTOCK_GPU_CHECK_NOTES"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the result of the call, and failures or skips of setup and teardown."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # xdist reports it again to the collecting process
    if report.when != "call" and report.passed:
        return
    reason = "" if report.passed else (report.longreprtext.strip().splitlines() or [""])[-1]
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "reason": reason[-300:]}
    with Path(os.environ[FILE_VARIABLE]).open("a") as file:
        file.write(json.dumps(line) + "\n")
