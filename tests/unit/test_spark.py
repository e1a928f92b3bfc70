"""Figures as one line of text."""

from __future__ import annotations

import pytest

from penstock.ops.top.tables import TABLES, spark
from penstock.ops.views.words import amount, cost, number, state_words
from penstock.shared.queue.budgets import Unit


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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.5, "0.50"),
        (0.0042, "0.0042"),
        (0.000012, "0.000012"),
        (2.51, "2.5"),
        (1234567, "1\u202f234\u202f567"),
    ],
)
def test_a_small_number_keeps_two_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_an_amount_of_money_keeps_four_decimals_or_two_digits() -> None:
    assert [cost(value) for value in (0.0, 0.0042, 0.0000421, 12.5)] == ["0.0000", "0.0042", "0.000042", "12.5000"]
    assert [amount(12.5, unit) for unit in Unit] == ["12.5", "12.5000"]
