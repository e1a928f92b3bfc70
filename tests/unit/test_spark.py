"""Figures as one line of text."""

from __future__ import annotations

import pytest

from penstock.ops.top.tables import spark


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([0, 0], "▁▁"),
        ([0, 50, 100], "▁▅█"),
        ([9, 9, 1, 1000], "▁▁█"),
        ([0.001, 0.002], "▅█"),
    ],
)
def test_the_newest_values_are_blocks_of_the_highest(values: list[float], line: str) -> None:
    assert spark(values, 3) == line
