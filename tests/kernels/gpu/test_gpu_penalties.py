"""Penalties in Triton against a float64 truth."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels.dispatch import KernelInputError
from penstock.kernels.penalties import penalize, reference

gpu = pytest.importorskip("penstock.kernels.penalties.gpu", reason="needs triton")


def entries(num_rows: int, vocab_size: int, num_entries: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_entries)
    places = torch.randperm(num_rows * vocab_size, generator=generator)[:num_entries]
    repetition = 0.5 + 2 * torch.rand(num_entries, generator=generator)
    deduction = torch.randn(num_entries, generator=generator)
    return places // vocab_size, places % vocab_size, repetition, deduction


@pytest.mark.parametrize("num_entries", [0, 1, 63, 1000])
def test_only_named_tokens_are_penalised(
    num_entries: int, device: torch.device, assert_close: Callable[[Tensor, Tensor], None]
) -> None:
    rows, token_ids, repetition, deduction = arguments = entries(7, 257, num_entries)
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(0))[:, 5:262]
    before = logits.double()
    chosen = before[rows, token_ids]
    factor = repetition.double()
    expected = before.clone()
    expected[rows, token_ids] = torch.where(chosen > 0, chosen / factor, chosen * factor) - deduction
    on_device = torch.full((7, 300), torch.nan, device=device)[:, 5:262]
    on_device.copy_(logits)
    gpu.penalize(on_device, *arguments)
    assert_close(on_device.cpu(), expected)
    is_changed = torch.zeros(7, 257, dtype=torch.bool)
    is_changed[rows, token_ids] = True
    assert torch.equal(on_device.cpu()[~is_changed], logits[~is_changed])
    again = logits.clone()
    reference.penalize(again, *arguments)
    assert_close(again, expected)


def test_wrong_inputs_are_named() -> None:
    arguments = entries(3, 9, 4)
    with pytest.raises(KernelInputError, match="logits must"):
        penalize(torch.zeros(3, 9, dtype=torch.bfloat16), *arguments)
    with pytest.raises(KernelInputError, match="token_ids must"):
        penalize(torch.zeros(3, 9), arguments[0], arguments[1].int(), *arguments[2:])
    with pytest.raises(KernelInputError, match="deduction must"):
        penalize(torch.zeros(3, 9), *arguments[:3], arguments[3][:2])
