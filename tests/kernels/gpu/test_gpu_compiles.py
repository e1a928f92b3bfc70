"""The compiler takes every Triton kernel, for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("compile_for_hopper.py")


@pytest.mark.timeout(600)
def test_kernels_compile_for_hopper() -> None:
    """In a process of its own: in this one Triton may be the interpreter.

    Triton keeps what it has compiled where it does for all programs, by sources, options and its own version: so this
    takes half a minute once, and after a change the time of what is changed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--brief"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    kernels = {line.partition("(")[0] for line in done.stdout.splitlines()}
    assert len(kernels) >= 22, kernels
