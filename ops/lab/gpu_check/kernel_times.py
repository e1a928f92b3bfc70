"""Part 2: the benchmark of the kernels."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from .plan import Plan
from .program import Ended, run_program

# After one of these a process gets nothing more from its device.
_LOST_DEVICE = ("CUDA error", "AcceleratorError", "illegal memory access", "device-side assert")


def time_kernels(plan: Plan, scratch: Path, limit_s: float) -> dict[str, Any]:
    """Run ``penstock.ops.lab.kernels``; after a kernel that ends or hangs it, run it again for the kernels after it.

    Returns ``rows`` and ``roofline`` as the benchmark writes them; a kernel without rows has one that says why.
    """
    deadline = time.monotonic() + limit_s
    remaining = list(plan.kernels)
    found: dict[str, Any] = {"error": None, "roofline": None, "rows": []}
    while remaining:
        left_s = deadline - time.monotonic()
        if left_s < 1:
            found["rows"] += [_failed(kernel, "not begun: no time was left") for kernel in remaining]
            break
        output = scratch / f"kernels-{len(remaining)}.json"
        ended = _run(plan, remaining, output, left_s)
        written = json.loads(output.read_text()) if output.exists() else {"rows": [], "roofline": None, "kernels": []}
        found["roofline"] = found["roofline"] or written["roofline"]
        done = _trusted(written)
        found["rows"] += [row for row in written["rows"] if row["kernel"] in done]
        remaining = remaining[len(done) :]
        if remaining and len(done) == len(written["kernels"]):
            found["rows"].append(_failed(remaining.pop(0), ended.error))
    failed = sorted({row["kernel"] for row in found["rows"] if row["error"]})
    if failed:
        found["error"] = f"without a time or with a wrong result: {', '.join(failed)}"
    return found


def _run(plan: Plan, kernels: list[str], output: Path, limit_s: float) -> Ended:
    command = [sys.executable, "-m", "penstock.ops.lab.kernels", "--device", plan.device, "--json", str(output)]
    command += ["--only", ",".join(kernels), *(["--quick"] if plan.is_quick else [])]
    return run_program(command, output.with_suffix(".log"), limit_s)


def _trusted(written: dict[str, Any]) -> list[str]:
    """The kernels that were measured, up to the first that lost the device."""
    for index, kernel in enumerate(written["kernels"]):
        errors = [row["error"] or "" for row in written["rows"] if row["kernel"] == kernel]
        if any(mark in error for error in errors for mark in _LOST_DEVICE):
            return written["kernels"][: index + 1]
    return written["kernels"]


def _failed(kernel: str, error: str) -> dict[str, Any]:
    return {"kernel": kernel, "shape": "", "dtype": "", "num_bytes": 0, "num_flop": 0, "us": None, "error": error}
