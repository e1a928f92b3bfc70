"""Compiled sampling against its reference, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock.kernels.dispatch import KernelInputError
from penstock.kernels.sampling import argmax, reference, sample

from .sampling_cases import draws_of, logits_of

pytestmark = pytest.mark.usefixtures("compiled")

DTYPES = [torch.float32, torch.bfloat16]
# Around the sizes of blocks, chunks and the number of tokens that are looked at first.
SHAPES = [(1, 1), (7, 41), (63, 64), (5, 257), (50, 1000), (12, 8193)]
FILTERS = [
    {},
    {"temperature": 0.3, "min_p": 0.05},
    {"top_k": 1},
    {"top_k": 64, "top_p": 0.9},
    {"top_k": 65},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.999, "temperature": 1.5},
    {"top_p": 0.9, "min_p": 0.1},
    {"top_p": 1e-6},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), SHAPES)
def test_argmax_is_the_first_of_the_largest(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    logits = logits_of(num_rows, vocab_size, 2.0).to(dtype).clamp(max=1.0)  # bounded above, so that there are ties
    poisoned = torch.full((num_rows, vocab_size + 9), math.nan, dtype=dtype)
    poisoned[:, 4:-5] = logits
    expected = (logits == logits.amax(dim=-1, keepdim=True)).float().argmax(dim=-1)
    assert torch.equal(argmax(poisoned[:, 4:-5]), expected)
    assert torch.equal(reference.argmax(logits), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("scale", [0.1, 4.0])
def test_the_same_token_is_drawn(params: dict[str, float], scale: float, dtype: torch.dtype) -> None:
    for num_rows, vocab_size in SHAPES:
        # Of float32 values, so that no two are equal: the order of equals is the reference's own.
        logits = logits_of(num_rows, vocab_size, scale)
        draws = draws_of(num_rows, **params)
        expected = reference.sample(logits.clone(), draws)
        if dtype == torch.bfloat16:
            logits, expected = logits.to(dtype), reference.sample(logits.to(dtype).float(), draws)
        result = sample(logits.clone(), draws)
        probability_lost = _distance_in_order(logits.float(), result, expected)
        assert probability_lost.max() < 1e-5 if dtype == torch.float32 else _are_as_probable(logits, result, expected)


def _distance_in_order(logits: Tensor, result: Tensor, expected: Tensor) -> Tensor:
    """Rows that differ do so by rounding at the edge of a token: 0 where they are neighbours in either order."""
    rank = logits.argsort(dim=-1, descending=True).argsort(dim=-1)
    rows = torch.arange(len(logits))
    by_rank = (rank[rows, result] - rank[rows, expected]).abs()
    by_place = (result - expected).abs()
    return torch.minimum(by_rank, by_place).clamp(min=1) - 1.0


def _are_as_probable(logits: Tensor, result: Tensor, expected: Tensor) -> bool:
    rows = torch.arange(len(logits))
    distance = _distance_in_order(logits.float(), result, expected)
    return bool(((logits[rows, result] == logits[rows, expected]) | (distance == 0)).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    num_rows, vocab_size = 44, 999
    logits, draws = logits_of(num_rows, vocab_size, 1.0).to(dtype), draws_of(num_rows)
    index = torch.arange(num_rows)
    draws.temperature = index % 3 * 0.7
    draws.top_k = torch.tensor([0, 5, 64, 300])[index % 4]
    draws.top_p = torch.tensor([1.0, 0.5, 0.9, 0.999, 1.0])[index % 5]
    together = sample(logits.clone(), draws)
    for row in range(num_rows):
        only = torch.tensor([row])
        assert sample(logits[only], draws.select(only)).item() == together[row]


@pytest.mark.parametrize("params", [*FILTERS, {"top_k": 10, "min_p": 0.5}], ids=str)
def test_rows_of_infinities_and_nan(params: dict[str, float]) -> None:
    """Excluded tokens are never drawn; a row of NaN gives some token and does not affect other rows."""
    logits = torch.full((5, 300), -math.inf)
    logits[0, 299] = -3.0
    logits[1, [7, 290]] = torch.tensor([0.0, -5.0])
    logits[3] = math.nan
    logits[4, 3] = math.inf
    tokens = sample(logits, draws_of(5, **params)).tolist()
    assert tokens[0] == 299
    assert tokens[1] in (7, 290)
    assert all(0 <= token < 300 for token in tokens)


def test_all_equal_logits() -> None:
    """More tokens than the row has room for at first tie with its most probable ones."""
    num_rows, vocab_size = 500, 5000
    tokens = sample(torch.zeros(num_rows, vocab_size), draws_of(num_rows, top_p=0.5))
    assert tokens.unique().numel() > 400
    assert sample(torch.zeros(3, vocab_size), draws_of(3, top_k=3)).tolist() == [0, 1, 2]


def test_wrong_inputs_are_named() -> None:
    draws = draws_of(3)
    with pytest.raises(KernelInputError, match="logits must"):
        argmax(torch.zeros(3, dtype=torch.float32))
    with pytest.raises(KernelInputError, match="logits must"):
        sample(torch.zeros(3, 5, dtype=torch.int64), draws)
    with pytest.raises(KernelInputError, match="temperature must"):
        sample(torch.zeros(2, 5), draws)
    draws.top_k = draws.top_k.int()
    with pytest.raises(KernelInputError, match="top_k must"):
        sample(torch.zeros(3, 5), draws)
