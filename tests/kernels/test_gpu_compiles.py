"""Kernels that the interpreter runs are also taken by the compiler, which needs no GPU for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("compile_for_hopper.py")


@pytest.mark.slow
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    ended = subprocess.run([sys.executable, PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [kernel for kernel in found if kernel["error"]] == []
    # Every kernel of these packages, most of them for two shapes.
    assert len({kernel["kernel"].partition(" ")[0] for kernel in found}) >= 13
