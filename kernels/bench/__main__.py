"""``python -m penstock.kernels.bench [--json FILE] [--only rms_norm,...] [--quick]``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import pkgutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from .. import __name__ as _kernels
from .. import __path__ as _kernels_path
from .. import native
from .case import Setting
from .report import as_json, as_text, describe
from .roofline import measure_roofline
from .row import Row, describe_error, measure_case

# For each function that is timed, in seconds.
QUICK_BUDGET_S, _BUDGET_S = 0.05, 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases, print the table; return 1 if a kernel gave a wrong result or none."""
    options = _parse(arguments)
    device = torch.device(options.device)
    if device.type == "cpu" and (why_not := native.load()):
        print(f"no compiled kernels for the CPU, so the references are timed: {why_not}", file=sys.stderr)
    budget_s = QUICK_BUDGET_S if options.quick else _BUDGET_S
    about = describe(device)
    print("  ".join(f"{key} {value}" for key, value in about.items()))
    roofline = measure_roofline(device, budget_s)
    print(f"copy {roofline.copy_gb_per_s:.0f} GB/s  matmul {roofline.matmul_tflop_per_s:.1f} TFLOP/s")
    rows: list[Row] = []
    done: list[str] = []
    for kernel in options.only:
        rows.extend(measure_kernel(kernel, device, budget_s, is_quick=options.quick))
        done.append(kernel)
        if options.json is not None:  # after each, as one that hangs must not cost the others' rows
            options.json.write_text(json.dumps(as_json(rows, roofline, {**about, "kernels": done}), indent=1) + "\n")
    print(as_text(rows, roofline))
    return int(any(row.error is not None for row in rows))


def measure_kernel(kernel: str, device: torch.device, budget_s: float, *, is_quick: bool) -> Iterator[Row]:
    """Its rows, each told on standard error when it is there."""
    try:
        setting = Setting(device, is_quick=is_quick)
        for case in importlib.import_module(f"{_kernels}.{kernel}.cases").cases(setting):
            row = measure_case(kernel, case, device, budget_s)
            print(f"{kernel} {case.shape} {row.dtype}: {row.error or f'{row.us:.1f} us'}", file=sys.stderr)
            yield row
    except Exception as error:  # cases that cannot be made here must not cost the other kernels' rows
        print(f"{kernel}, its cases:\n{traceback.format_exc()}", file=sys.stderr)
        yield Row(kernel, "its cases", "", 0, 0, error=describe_error(error))


def find_kernels() -> list[str]:
    """Packages of kernels that have a file ``cases.py``."""
    found = [module.name for module in pkgutil.iter_modules(_kernels_path) if module.ispkg]
    return [name for name in found if importlib.util.find_spec(f"{_kernels}.{name}.cases") is not None]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    known = find_kernels()
    parser = argparse.ArgumentParser("penstock.kernels.bench", description="Time every kernel beside torch's own.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--only", metavar="NAMES", help=f"kernels, with commas between, of: {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help="one shape each, less often")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    options.only = known if options.only is None else options.only.split(",")
    unknown = sorted(set(options.only) - set(known))
    if unknown:
        parser.error(f"no kernel {', '.join(unknown)}; there are {', '.join(known)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
