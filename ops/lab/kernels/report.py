"""Format the rows as aligned text and as JSON, with device, versions and commit."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .cases import SEED
from .roofline import Roofline
from .row import Row

_HEADINGS = ("kernel", "shape", "dtype", "us", "host us", "rate", "share", "rivals: their time / ours")
_NUM_TEXT_COLUMNS = 3


def describe(device: torch.device) -> dict[str, Any]:
    """Return device, versions, commit and seed."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "num_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _package_version("triton"),
        "commit": _commit(),
        "seed": SEED,
    }


def as_text(rows: Sequence[Row], roofline: Roofline) -> str:
    """Return a table with its numbers aligned to the right; the last column is not padded."""
    table = [_HEADINGS, *(_cells(row, roofline) for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(_HEADINGS) - 1)]
    lines: list[str] = []
    for line in table:
        padded = [
            cell.ljust(width) if i < _NUM_TEXT_COLUMNS else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=False))
        ]
        lines.append("  ".join([*padded, line[-1]]).rstrip())
    return "\n".join(lines)


def as_json(rows: Sequence[Row], roofline: Roofline, about: dict[str, Any]) -> dict[str, Any]:
    return {
        **about,
        "roofline": {"copy_gb_per_s": roofline.copy_gb_per_s, "matmul_tflop_per_s": roofline.matmul_tflop_per_s},
        "rows": [row.as_json(roofline) for row in rows],
    }


def _cells(row: Row, roofline: Roofline) -> tuple[str, ...]:
    if row.us is None or row.host_us is None:
        return (row.kernel, row.shape, row.dtype, "", "", "", "", f"FAILED: {row.error}")
    share = row.share(roofline)
    rivals = [
        f"{name} {'failed' if us is None else f'{us / row.us:.2f}'}" for name, us in (row.rivals_us or {}).items()
    ]
    times = f"{row.us:.1f}", f"{row.host_us:.0f}"
    return (row.kernel, row.shape, row.dtype, *times, row.rate(roofline), f"{share:.0%}", ", ".join(rivals))


def _package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the source tree, followed by "+" if files differ from it; None outside a git checkout."""
    outputs: list[str] = []
    for command in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            git = subprocess.run(
                ["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        outputs.append(git.stdout.strip())
    return outputs[0] + ("+" if outputs[1] else "")
