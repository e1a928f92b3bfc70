"""Threads without an item help with the nested work of others."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.kernels.native import build as build_module

COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), "")
NATIVE = Path(build_module.__file__).parent
SOURCES = (Path(__file__).with_name("parallel_help.cpp"), NATIVE / "base" / "parallel.cpp")


@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
def test_an_item_is_shared_only_where_requested(tmp_path: Path) -> None:
    program = tmp_path / "parallel_help"
    subprocess.run([COMPILER, "-O2", "-std=c++17", "-pthread", f"-I{NATIVE}", *SOURCES, "-o", program], check=True)
    assert subprocess.run([program], check=False).returncode == 0
    assert subprocess.run([program, "alone"], check=False).returncode == 0
