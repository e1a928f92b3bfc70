"""The compiler takes every Triton kernel, for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("compile_for_hopper.py")


def test_kernels_compile_for_hopper() -> None:
    """Compile in a separate process, since this one may run Triton's interpreter.

    Triton's cache of compiled kernels is keyed by sources, options and its version. So this test takes half a minute
    once, and later only the time of changed kernels.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    compilation = subprocess.run(
        [sys.executable, str(PROGRAM), "--brief"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert compilation.returncode == 0, compilation.stdout[-2000:] + compilation.stderr[-4000:]
    kernels = {line.partition("(")[0] for line in compilation.stdout.splitlines()}
    assert len(kernels) >= 23, kernels
