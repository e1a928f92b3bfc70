"""The choice among ways to compute the same, by fake clocks: only one that is right and faster is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from penstock.worker.models.checks.choice import Choice, Run, choose


def right() -> Sequence[Tensor]:
    return [torch.arange(6.0).view(3, 2), torch.ones(3, 1)]


def rounded() -> Sequence[Tensor]:
    return [tensor * (1 + 1e-6) for tensor in right()]


def wrong() -> Sequence[Tensor]:
    """Return results of which one row of three is off by a percent."""
    results = right()
    results[0][1] *= 1.01
    return results


def spoilt() -> Sequence[Tensor]:
    return [torch.full_like(tensor, torch.nan) for tensor in right()]


def other_form() -> Sequence[Tensor]:
    return right()[:1]


def missing() -> Sequence[Tensor]:
    raise ModuleNotFoundError("No module named 'flash_attn'\nand more")


def chosen_of(ways: dict[str, Run], times: dict[str, float]) -> Choice:
    """Choose by a clock that knows the times."""
    names = {run: name for name, run in ways.items()}

    def measure_us(call: Callable[[], object]) -> float:
        return times[names[call]]  # pyright: ignore[reportArgumentType]

    return choose("plain", ways, measure_us)


def test_the_fastest_that_is_right_is_chosen() -> None:
    ways = {"plain": right, "slow": rounded, "wrong": wrong}
    choice = chosen_of(ways | {"fast": lambda: rounded()}, {"plain": 10, "slow": 12, "fast": 5})
    assert choice.name == "fast"
    assert choice.us == {"plain": 10, "slow": 12, "fast": 5}
    assert list(choice.refused) == ["wrong"]


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (wrong, "its results differ by 0.01"),
        (spoilt, "its results differ by nan"),
        (other_form, "its results have another form"),
        (missing, "ModuleNotFoundError: No module named 'flash_attn'"),
    ],
)
def test_a_way_that_is_wrong_or_missing_is_not_even_timed(run: Run, reason: str) -> None:
    choice = chosen_of({"plain": right, "other": run}, {"plain": 10})
    assert (choice.name, choice.refused) == ("plain", {"other": reason})


def test_a_way_that_is_hardly_faster_is_not_chosen() -> None:
    assert chosen_of({"plain": right, "other": rounded}, {"plain": 10, "other": 9.9}).name == "plain"


def test_a_way_that_raises_while_it_is_timed_is_not_chosen() -> None:
    def measure_us(call: Callable[[], object]) -> float:
        if call is rounded:
            raise RuntimeError("operation not permitted when stream is capturing")
        return 10.0

    choice = choose("plain", {"plain": right, "other": rounded}, measure_us)
    assert choice.name == "plain"
    assert "not permitted" in choice.refused["other"]


def test_without_a_time_of_the_plain_way_it_is_chosen() -> None:
    choice = choose("plain", {"plain": missing, "other": right}, lambda call: 1.0)
    assert (choice.name, choice.us) == ("plain", {})
    assert list(choice.refused) == ["plain"]


def test_rows_may_be_absent_or_zeros() -> None:
    for num_rows in (0, 2):
        zeros = [torch.zeros(num_rows, 3)]
        ways = {"plain": lambda zeros=zeros: zeros, "other": lambda zeros=zeros: [zeros[0].clone()]}
        assert chosen_of(ways, {"plain": 10, "other": 1}).name == "other"
