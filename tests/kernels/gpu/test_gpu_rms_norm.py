"""The Triton kernels of the normalisations against their references in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels.rms_norm import gpu, reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

Compare = Callable[[Tensor, Tensor], None]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of one row and of many; narrower and wider than a program's block, in powers of two and not.
ODD_SHAPES = [(1, 8), (7, 41), (63, 128), (5, 1000), (3, 4096)]
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), ODD_SHAPES)
def test_rms_norm(num_tokens: int, size: int, dtype: torch.dtype, device: torch.device, assert_close: Compare) -> None:
    fused = random(num_tokens, 3, size, dtype=dtype, device=device) * 4
    weight = random(size, dtype=dtype, device=device)
    for inputs in (fused[:, 1], fused[:, 1].contiguous(), fused[:, 0].T.contiguous().T):
        before = inputs.clone()
        expected = reference.rms_norm(inputs.double(), weight.double(), EPS)
        assert_close(gpu.rms_norm(inputs, weight, EPS), expected)
        assert_close(gpu.rms_norm(inputs, weight.float(), EPS), expected)
        assert torch.equal(inputs, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_with_a_weight_each(dtype: torch.dtype, device: torch.device, assert_close: Compare) -> None:
    heads = random(9, 7, 48, dtype=dtype, device=device)[:, 1:6]
    weight = random(5, 48, dtype=dtype, device=device)
    normed = gpu.rms_norm(heads, weight, EPS)
    assert normed.is_contiguous()
    assert_close(normed, reference.rms_norm(heads.double(), weight.double(), EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), ODD_SHAPES)
def test_add_rms_norm(
    num_tokens: int, size: int, dtype: torch.dtype, device: torch.device, assert_close: Compare
) -> None:
    inputs = random(num_tokens, 2 * size, dtype=dtype, device=device)[:, size:]
    residual = random(num_tokens, size, dtype=dtype, device=device) * 3
    weight = random(size, dtype=dtype, device=device)
    expected_sum = residual + inputs
    for variant in (residual.clone(), residual.T.contiguous().T):
        normed, summed = gpu.add_rms_norm(inputs, variant, weight, EPS)
        assert torch.equal(summed, expected_sum)
        # The norm of the rounded sum, which is also the input of the model's next layer.
        assert_close(normed, reference.rms_norm(expected_sum.double(), weight.double(), EPS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_where_the_reference_does(dtype: torch.dtype, device: torch.device) -> None:
    """Twice, so nearly all numbers are those of transformers' module to the last bit."""
    inputs, weight = random(63, 128, dtype=dtype, device=device), random(128, dtype=dtype, device=device)
    same = gpu.rms_norm(inputs, weight, EPS) == reference.rms_norm(inputs, weight, EPS)
    assert same.double().mean() > 0.99


@pytest.mark.parametrize("size", [64, 1000])
def test_a_row_has_the_same_bits_in_any_batch(size: int, device: torch.device) -> None:
    inputs, residual = (random(63, size, dtype=torch.float32, device=device) * factor for factor in (1, 2))
    weight = random(size, dtype=torch.float32, device=device)
    normed = gpu.rms_norm(inputs, weight, EPS)
    added, _ = gpu.add_rms_norm(inputs, residual.clone(), weight, EPS)
    for first, last in ((0, 1), (17, 18), (5, 22), (62, 63)):
        assert torch.equal(gpu.rms_norm(inputs[first:last], weight, EPS), normed[first:last])
        alone, _ = gpu.add_rms_norm(inputs[first:last], residual[first:last].clone(), weight, EPS)
        assert torch.equal(alone, added[first:last])


def test_no_rows_and_rows_too_wide(device: torch.device, assert_close: Compare) -> None:
    weight = random(32769, dtype=torch.float32, device=device)
    assert gpu.rms_norm(torch.empty(0, 8, device=device), weight[:8], EPS).shape == (0, 8)
    inputs = random(2, 32769, dtype=torch.float32, device=device)
    assert_close(gpu.rms_norm(inputs, weight, EPS), reference.rms_norm(inputs.double(), weight.double(), EPS))
    normed, summed = gpu.add_rms_norm(inputs, inputs.clone(), weight, EPS)
    assert torch.equal(summed, inputs + inputs)
    assert_close(normed, reference.rms_norm(summed.double(), weight.double(), EPS))


def test_not_a_number_stays_in_its_row(device: torch.device) -> None:
    inputs = random(3, 16, dtype=torch.float32, device=device)
    inputs[1, 5] = float("nan")
    normed = gpu.rms_norm(inputs, torch.ones(16, device=device), EPS)
    assert normed.isnan().all(dim=1).tolist() == [False, True, False]
    assert not normed[::2].isnan().any()
