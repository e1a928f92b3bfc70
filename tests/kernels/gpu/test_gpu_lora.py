"""Low-rank adapters in Triton against the reference in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels.dispatch import KernelInputError
from penstock.kernels.lora import lora_expand, lora_shrink, reference

gpu = pytest.importorskip("penstock.kernels.lora.gpu", reason="needs triton")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))).to(dtype)


def adapters_of(num_tokens: int, num_adapters: int) -> Tensor:
    return (torch.arange(num_tokens) * 7 + 1) % (num_adapters + 1) - 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_inputs", "rank"), [(1, 41, 3), (63, 1100, 16), (20, 64, 40)])
def test_shrink(
    num_tokens: int,
    num_inputs: int,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    inputs = random(num_tokens, num_inputs, dtype=dtype)
    a = random(4, rank, num_inputs, dtype=dtype, scale=num_inputs**-0.5)
    token_lora = adapters_of(num_tokens, 4)
    result = gpu.lora_shrink(inputs.to(device), a.to(device), token_lora.to(device)).cpu()
    assert result.dtype == torch.float32
    assert_close(result, reference.lora_shrink(inputs.double(), a.double(), token_lora))
    assert (result[token_lora < 0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_outputs", "rank"), [(1, 7, 3), (63, 130, 16), (20, 40, 40)])
def test_expand(
    num_tokens: int,
    num_outputs: int,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    inputs, b = random(num_tokens, rank), random(4, num_outputs, rank, dtype=dtype, scale=rank**-0.5)
    token_lora = adapters_of(num_tokens, 4)
    has_adapter = token_lora >= 0
    before = random(num_tokens, num_outputs, dtype=dtype)
    before[~has_adapter] = torch.nan
    fused = torch.full((num_tokens, num_outputs + 9), torch.nan, dtype=dtype, device=device)
    out = fused[:, 4:-5]
    out.copy_(before)
    gpu.lora_expand(inputs.to(device), b.to(device), token_lora.to(device), out, 0.5)
    expected = before.double()
    reference.lora_expand(inputs.to(dtype).double(), b.double(), token_lora, expected, 0.5)
    assert_close(out.cpu()[has_adapter], expected[has_adapter])
    assert out.cpu()[~has_adapter].isnan().all()
    assert fused[:, :4].isnan().all()
    assert fused[:, -5:].isnan().all()


def test_an_adapter_of_a_smaller_rank_is_filled_up_with_zeros(device: torch.device) -> None:
    inputs, a, b = random(9, 64), random(2, 16, 64), random(2, 24, 16)
    a[1, 8:], b[1, :, 8:] = 0.0, torch.randn(24, 8)
    token_lora = torch.ones(9, dtype=torch.int32)
    out = torch.zeros(9, 24, device=device)
    result = gpu.lora_shrink(inputs.to(device), a.to(device), token_lora.to(device))
    gpu.lora_expand(result, b.to(device), token_lora.to(device), out, 1.0)
    torch.testing.assert_close(out.cpu(), inputs @ a[1, :8].T @ b[1, :, :8].T, rtol=1e-4, atol=1e-4)


def test_wrong_inputs_are_named() -> None:
    inputs, a, b, ids = torch.zeros(3, 8), torch.zeros(2, 4, 8), torch.zeros(2, 5, 4), torch.zeros(3, dtype=torch.int32)
    small, out = torch.zeros(3, 4), torch.zeros(3, 5)
    for call, name in (
        (lambda: lora_shrink(inputs, a[:, :, :7], ids), "inputs and a must"),
        (lambda: lora_shrink(inputs, a.half(), ids), "a must be"),
        (lambda: lora_shrink(inputs, torch.zeros(2, 8, 4).mT, ids), "last axis"),
        (lambda: lora_shrink(inputs, a, ids[:2]), "token_lora must"),
        (lambda: lora_expand(small, b, ids, out[:2]), "out must"),
        (lambda: lora_expand(small, b, ids, out.half()), "out must"),
        (lambda: lora_expand(small.half(), b, ids, out), "inputs must be float32"),
    ):
        with pytest.raises(KernelInputError, match=name):
            call()
    lora_expand(lora_shrink(inputs, a, ids), b, ids, out)
