"""The table of a GGUF file's start, memory, speed and quality."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
from rich.console import Console

from penstock.ops.lab.bench.real_file import FileFigures, proportional_bytes, table_of


def test_row_shows_memory_as_a_multiple_of_the_file(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(bytes(1 << 20))
    rates = {"prompt_rate": 1000.0, "rate": 100.0, "rate_of_all": 450.0}
    figures = {"ready_s": 2.0, "start_s": 3.5, "memory_bytes": 3 << 20, **rates}
    rows = [FileFigures(name="ours", **figures, kl=0.0051), FileFigures(name="theirs", **figures)]
    console = Console(width=120, record=True, quiet=False)
    console.print(table_of(rows, model))
    lines = [line.split() for line in console.export_text().splitlines()]
    cells = [[word for word in line if word not in "│┃"] for line in lines]
    assert ["ours", "2.0", "3.5", "3", "3.0", "1000", "100", "450", "0.0051"] in cells
    assert ["theirs", "2.0", "3.5", "3", "3.0", "1000", "100", "450", "-"] in cells


def test_proportional_memory_is_at_most_the_resident_memory() -> None:
    assert 0 < proportional_bytes(os.getpid()) <= psutil.Process().memory_info().rss
