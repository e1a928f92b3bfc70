"""Sampling in Triton against the reference, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock.kernels.dispatch import KernelInputError
from penstock.kernels.sampling import Draws, reference, sample

from ..sampling_cases import draws_of, logits_of
from .sizes import many

gpu = pytest.importorskip("penstock.kernels.sampling.gpu", reason="needs triton")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Around the sizes of blocks and the number of tokens that are looked at first.
# Of those the last is of more than one program.
SHAPES = [(1, 1), (1, 41), (2, 257), (many(3, 1), 1000), (1, 4099)]
FILTERS = [
    {},
    {"temperature": 0.3, "min_p": 0.05},
    {"top_k": 1},
    {"top_k": 64, "top_p": 0.9},
    {"top_k": 65},
    {"top_k": 700, "top_p": 0.97, "min_p": 0.001},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.999, "temperature": 1.5},
    {"top_p": 0.9, "min_p": 0.1},
    {"top_p": 1e-6},
    {"temperature": 0.0},
]


def decided_tokens(logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """The reference's tokens, and which rows would have theirs if uniform number or ``top_p`` were a little other."""
    tokens = reference.sample(logits.clone(), draws)
    is_decided = torch.ones(len(logits), dtype=torch.bool)
    for change_u, change_p in ((1e-6, 0.0), (-1e-6, 0.0), (0.0, 1e-5), (0.0, -1e-5)):
        top_p = torch.where(draws.top_p < 1, draws.top_p * (1 + change_p), 1.0)
        uniforms = (draws.uniforms + change_u).clamp(0, 1 - 2**-53)
        near = Draws(draws.temperature, draws.top_k, top_p, draws.min_p, uniforms)
        is_decided &= reference.sample(logits.clone(), near) == tokens
    return tokens, is_decided


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), SHAPES)
def test_argmax_is_the_first_of_the_largest(
    num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    logits = logits_of(num_rows, vocab_size, 2.0).clamp(max=1.0).to(dtype)  # bounded above, so that there are ties
    logits[0, -1] = 0.0
    poisoned = torch.full((num_rows, vocab_size + 9), math.nan, dtype=dtype, device=device)
    poisoned[:, 4:-5] = logits.to(device)
    expected = (logits == logits.amax(dim=-1, keepdim=True)).float().argmax(dim=-1)
    assert torch.equal(gpu.argmax(poisoned[:, 4:-5]).cpu(), expected)
    zeros = torch.tensor([[-1.0, -0.0, 0.0, -0.0]], dtype=dtype, device=device)
    assert gpu.argmax(zeros).item() == 1


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("scale", [0.1, 4.0])
def test_the_same_token_is_drawn(params: dict[str, float], scale: float, device: torch.device) -> None:
    num_decided = num_rows_in_all = 0
    for num_rows, vocab_size in SHAPES:
        logits = logits_of(num_rows, vocab_size, scale)  # of float32, so that no two are equal
        draws = draws_of(num_rows, **params)
        expected, is_decided = decided_tokens(logits, draws)
        result = gpu.sample(logits.to(device), draws).cpu()
        assert torch.equal(result[is_decided], expected[is_decided]), vocab_size
        assert ((result >= 0) & (result < vocab_size)).all()
        num_decided += int(is_decided.sum())
        num_rows_in_all += num_rows
    assert num_decided >= 0.8 * num_rows_in_all


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("params", [{}, {"top_k": 20, "top_p": 0.9}, {"top_k": 300}, {"top_p": 0.98}], ids=str)
def test_rounded_logits_draw_as_probable_a_token(
    params: dict[str, float], dtype: torch.dtype, device: torch.device
) -> None:
    """The order of equal logits is free, so the drawn token must be as probable as the expected one."""
    num_rows = many(9, 4)
    logits = logits_of(num_rows, 1000, 3.0).to(dtype)
    draws = draws_of(num_rows, **params)
    expected, is_decided = decided_tokens(logits.float(), draws)
    result = gpu.sample(logits.to(device), draws).cpu()
    rows = torch.arange(num_rows)[is_decided]
    assert torch.equal(logits[rows, result[rows]], logits[rows, expected[rows]])


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_k": 300}, {"top_p": 0.5}, {"top_p": 0.999}], ids=str)
def test_draws_follow_the_distribution(params: dict[str, float], device: torch.device) -> None:
    """Over evenly spread numbers each token comes as often as it is probable, to within one draw at each edge."""
    num_rows = many(11, 5)
    row = logits_of(1, 1000, 2.0)
    result = gpu.sample(row.repeat(num_rows, 1).to(device), draws_of(num_rows, **params)).cpu()
    probabilities = torch.softmax(row[0].double(), 0)
    order = probabilities.argsort(descending=True)
    limit = int(params.get("top_k", 1000))
    kept_probabilities = probabilities[order[:limit]] / probabilities[order[:limit]].sum()
    is_kept = kept_probabilities.cumsum(0) - kept_probabilities < params.get("top_p", 1.0)
    expected = torch.zeros(1000, dtype=torch.float64)
    expected[order[:limit][is_kept]] = kept_probabilities[is_kept] / kept_probabilities[is_kept].sum()
    counts = torch.bincount(result, minlength=1000)
    assert ((counts - num_rows * expected).abs() <= 1.0 + 1e-3).all()


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    num_rows, vocab_size = 12, 999
    logits, draws = logits_of(num_rows, vocab_size, 1.0).to(device), draws_of(num_rows)
    index = torch.arange(num_rows)
    draws.temperature = index % 3 * 0.7
    draws.top_k = torch.tensor([0, 5, 64, 300])[index % 4]
    draws.top_p = torch.tensor([1.0, 0.5, 0.9, 0.999, 1.0])[index % 5]
    together = gpu.sample(logits, draws)
    for row in range(num_rows):
        only = torch.tensor([row])
        assert gpu.sample(logits[row : row + 1], draws.select(only)).item() == together[row]


@pytest.mark.parametrize(
    ("num_left", "scale", "params"),
    [
        (5, 1.0, {"top_k": 20}),
        (5, 1.0, {"top_p": 0.9}),
        (70, 1.0, {"top_p": 0.99}),
        (700, 6.0, {"top_p": 0.5}),
        (700, 6.0, {"top_k": 20}),
        (700, 0.1, {"top_p": 0.5}),
        (700, 0.1, {"top_k": 600}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_with_few_neighbouring_candidates(
    num_left: int, scale: float, params: dict[str, float], device: torch.device
) -> None:
    """A grammar may leave such rows: few blocks have candidates, and these are more than the capacity."""
    logits = torch.full((2, 2100), -math.inf)
    logits[:, 1000 : 1000 + num_left] = logits_of(2, num_left, scale)
    draws = draws_of(2, **params)
    expected, is_decided = decided_tokens(logits, draws)
    result = gpu.sample(logits.to(device), draws).cpu()
    assert torch.equal(result[is_decided], expected[is_decided])
    assert is_decided.any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which the interpreter uses, warns of infinities
@pytest.mark.parametrize("params", [*FILTERS[::2], {"top_k": 10, "min_p": 0.5}], ids=str)
def test_rows_of_infinities_and_nan(params: dict[str, float], device: torch.device) -> None:
    """Excluded tokens are never drawn; a row of NaN gives some token and does not affect other rows."""
    logits = torch.full((6, 1000), -math.inf)
    logits[0, 299] = -3.0
    logits[1, [7, 990]] = torch.tensor([0.0, -5.0])
    logits[3] = math.nan
    logits[4, 3] = math.inf
    logits[5, 1:] = torch.linspace(-1, 1, 999)
    logits[5, 0] = math.nan
    tokens = gpu.sample(logits.to(device), draws_of(6, **params)).tolist()
    assert tokens[0] == 299
    assert tokens[1] in (7, 990)
    assert all(0 <= token < 1000 for token in tokens)


def test_all_equal_logits(device: torch.device) -> None:
    """More tokens than there is room for candidates tie with the most probable ones."""
    zeros = torch.zeros(5, 1500, device=device)
    num_rows = many(5, 2)
    assert gpu.sample(zeros[:num_rows], draws_of(num_rows, top_p=0.5)).unique().numel() == num_rows
    assert gpu.sample(zeros[:3], draws_of(3, top_k=3)).tolist() == [0, 1, 2]
    assert gpu.sample(zeros[:5], draws_of(5, top_k=10, top_p=0.45)).tolist() == [0, 1, 2, 3, 4]


def test_no_rows(device: torch.device) -> None:
    assert gpu.sample(torch.zeros(0, 9, device=device), draws_of(0)).shape == (0,)


def test_parameters_may_be_on_the_device_of_the_logits(device: torch.device) -> None:
    logits = logits_of(2, 257, 2.0)
    expected = gpu.sample(logits.to(device), draws_of(2, top_k=9))
    assert torch.equal(gpu.sample(logits.to(device), draws_of(2, top_k=9).to(device)), expected)
    assert torch.equal(reference.sample(logits.to(device), draws_of(2, top_k=9).to(device)), expected)
    with pytest.raises(KernelInputError, match="temperature must be contiguous"):
        sample(logits.to(device), draws_of(5).to(torch.device("meta")))
