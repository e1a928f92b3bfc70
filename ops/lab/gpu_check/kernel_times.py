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
    """Run ``penstock.ops.lab.kernels``; if a kernel crashes or hangs it, run it again for the next kernels.

    Return ``rows`` and ``roofline`` as the benchmark writes them. A kernel without rows gets one with the reason.
    """
    deadline = time.monotonic() + limit_s
    remaining = list(plan.kernels)
    result: dict[str, Any] = {"error": None, "roofline": None, "rows": []}
    while remaining:
        left_s = deadline - time.monotonic()
        if left_s < 1:
            result["rows"] += [_failed(kernel, "not begun: no time was left") for kernel in remaining]
            break
        output = scratch / f"kernels-{len(remaining)}.json"
        ended = _run_kernels(plan, remaining, output, left_s)
        output_data = (
            json.loads(output.read_text()) if output.exists() else {"rows": [], "roofline": None, "kernels": []}
        )
        result["roofline"] = result["roofline"] or output_data["roofline"]
        trusted_kernels = _trusted(output_data)
        result["rows"] += [row for row in output_data["rows"] if row["kernel"] in trusted_kernels]
        remaining = remaining[len(trusted_kernels) :]
        if remaining and len(trusted_kernels) == len(output_data["kernels"]):
            result["rows"].append(_failed(remaining.pop(0), ended.error))
    failed = sorted({row["kernel"] for row in result["rows"] if row["error"]})
    if failed:
        result["error"] = f"without a time or with a wrong result: {', '.join(failed)}"
    return result


def _run_kernels(plan: Plan, kernels: list[str], output: Path, limit_s: float) -> Ended:
    command = [sys.executable, "-m", "penstock.ops.lab.kernels", "--device", plan.device, "--json", str(output)]
    command += ["--only", ",".join(kernels), *(["--quick"] if plan.is_quick else [])]
    return run_program(command, output.with_suffix(".log"), limit_s)


def _trusted(output_data: dict[str, Any]) -> list[str]:
    """Return the measured kernels, up to the first that lost the device."""
    for index, kernel in enumerate(output_data["kernels"]):
        errors = [row["error"] or "" for row in output_data["rows"] if row["kernel"] == kernel]
        if any(mark in error for error in errors for mark in _LOST_DEVICE):
            return output_data["kernels"][: index + 1]
    return output_data["kernels"]


def _failed(kernel: str, error: str) -> dict[str, Any]:
    return {"kernel": kernel, "shape": "", "dtype": "", "num_bytes": 0, "num_flop": 0, "us": None, "error": error}
