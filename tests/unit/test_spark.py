"""Figures as one line of text."""

from __future__ import annotations

import pytest

from penstock.ops.top.tables import TABLES, spark
from penstock.ops.views.words import state_words


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


@pytest.mark.parametrize(
    "value", [float("inf"), float("nan"), -1.0, 1e300, 2**70, "\ud800", "\x1b[2J\u202e", "漢字\n🙂"]
)
def test_no_value_breaks_a_table(value: float | str) -> None:
    for table in TABLES:
        for column in table.columns:
            if isinstance(value, str) is not (column.show in (str, state_words)) or column.key == "lanes":
                continue  # the column has values of another kind
            text = column.text({column.key: value})
            assert text.encode(), "a terminal can show it"
            assert "\n" not in text
            assert "\x1b" not in text
