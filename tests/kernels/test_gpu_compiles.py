"""The compiler takes every Triton kernel, for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("compile_for_hopper.py")


@pytest.mark.timeout(300)
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """In a process of its own: in this one Triton may be the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--brief"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    kernels = {line.partition("(")[0] for line in done.stdout.splitlines()}
    assert len(kernels) >= 22, kernels
