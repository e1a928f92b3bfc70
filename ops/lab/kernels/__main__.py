"""``python -m penstock.ops.lab.kernels [--json FILE] [--only rms_norm,...] [--quick]``."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ....kernels import native
from . import cases
from .cases import Setting
from .report import as_json, as_text, describe
from .roofline import measure_roofline
from .row import Row, describe_error, measure_case

# Seconds per timed function.
QUICK_BUDGET_S, _BUDGET_S = 0.05, 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases and print the table; return 1 if a kernel raised or gave a wrong result."""
    options = _parse(arguments)
    device = torch.device(options.device)
    if device.type == "cpu" and (reason := native.load()):
        print(f"no compiled kernels for the CPU, so the references are timed: {reason}", file=sys.stderr)
    budget_s = QUICK_BUDGET_S if options.quick else _BUDGET_S
    about = describe(device)
    print("  ".join(f"{key} {value}" for key, value in about.items()))
    roofline = measure_roofline(device, budget_s, is_quick=options.quick)
    print(f"copy {roofline.copy_gb_per_s:.0f} GB/s  matmul {roofline.matmul_tflop_per_s:.1f} TFLOP/s")
    rows: list[Row] = []
    finished: list[str] = []
    for kernel in options.only:
        rows.extend(measure_kernel(kernel, device, budget_s, is_quick=options.quick))
        finished.append(kernel)
        if options.json is not None:  # after each kernel, so that one that hangs does not cost the rows before it
            options.json.write_text(
                json.dumps(as_json(rows, roofline, {**about, "kernels": finished}), indent=1) + "\n"
            )
    print(as_text(rows, roofline))
    return int(any(row.error is not None for row in rows))


def measure_kernel(kernel: str, device: torch.device, budget_s: float, *, is_quick: bool) -> Iterator[Row]:
    """Yield the rows of ``kernel``; print each on standard error as soon as it is measured."""
    try:
        setting = Setting(device, is_quick=is_quick)
        for case in importlib.import_module(f"{cases.__name__}.{kernel}").cases(setting):
            row = measure_case(kernel, case, device, budget_s)
            print(f"{kernel} {case.shape} {row.dtype}: {row.error or f'{row.us:.1f} us'}", file=sys.stderr)
            yield row
    except Exception as error:  # cases that fail to build here must not cost the other kernels' rows
        print(f"{kernel}, its cases:\n{traceback.format_exc()}", file=sys.stderr)
        yield Row(kernel, "its cases", "", 0, 0, error=describe_error(error))


def find_kernels() -> list[str]:
    """Return the names of the kernels that have cases."""
    return [module.name for module in pkgutil.iter_modules(cases.__path__)]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    available = find_kernels()
    parser = argparse.ArgumentParser(
        "penstock.ops.lab.kernels", description="Time every kernel next to torch's own operations."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument("--only", metavar="NAMES", help=f"kernels, separated by commas, among: {', '.join(available)}")
    parser.add_argument("--quick", action="store_true", help="one shape of each kernel, fewer calls")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    options.only = available if options.only is None else options.only.split(",")
    unknown = sorted(set(options.only) - set(available))
    if unknown:
        parser.error(f"no kernel {', '.join(unknown)}; available: {', '.join(available)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
