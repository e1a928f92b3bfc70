"""Products by groups in Triton against a float64 truth."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels.dispatch import KernelInputError
from penstock.kernels.grouped_linear import grouped_linear, reference

gpu = pytest.importorskip("penstock.kernels.grouped_linear.gpu", reason="needs triton")
groups = pytest.importorskip("penstock.kernels.grouped_linear.gpu_groups", reason="needs triton")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))).to(dtype)


def ids_of(num_groups: int, *shape: int) -> Tensor:
    return torch.randint(-1, num_groups, shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("num_groups", "num_entries", "block"), [(1, 1, 16), (5, 63, 16), (9, 1100, 32), (4, 3, 16)])
def test_blocks_are_of_one_group_and_keep_the_order(
    num_groups: int, num_entries: int, block: int, device: torch.device
) -> None:
    ids = ids_of(num_groups, num_entries)
    result = groups.group_rows(ids.to(device), num_groups, block)
    num_blocks = int(result.num_blocks)
    assert num_blocks <= result.max_blocks
    order = result.order.cpu()[: num_blocks * block].view(num_blocks, block)
    for group in range(num_groups):
        blocks = order[result.group_of_block.cpu()[:num_blocks] == group].flatten()
        expected = torch.where(ids == group)[0]
        assert torch.equal(blocks[: len(expected)].long(), expected)
        assert (blocks[len(expected) :] >= num_entries).all()
        assert len(blocks) == -(-len(expected) // block) * block
    assert not (result.group_of_block.cpu()[:num_blocks] < 0).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_each", "num_inputs", "num_outputs"), [(1, 1, 41, 7), (63, 2, 256, 130)])
def test_each_row_is_multiplied_by_its_group(
    num_tokens: int,
    num_each: int,
    num_inputs: int,
    num_outputs: int,
    dtype: torch.dtype,
    device: torch.device,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    inputs = random(num_tokens, 2 * num_inputs, dtype=dtype)[:, num_inputs:]
    weight = random(5, num_outputs, num_inputs, dtype=dtype, scale=num_inputs**-0.5)
    ids = ids_of(5, num_tokens, num_each)
    on_device = random(num_tokens, 2 * num_inputs, dtype=dtype).to(device)[:, num_inputs:]
    result = gpu.grouped_linear(on_device, weight.to(device), ids.to(device)).cpu()
    expected = reference.grouped_linear(inputs.double(), weight.double(), ids)
    assert_close(result, expected)
    assert torch.equal(result[ids < 0], torch.zeros_like(result[ids < 0]))


def test_rows_outside_the_groups_are_unchanged(
    device: torch.device, assert_close: Callable[[Tensor, Tensor], None]
) -> None:
    inputs, weight = random(20, 96).to(device), random(3, 40, 96, scale=0.1).to(device)
    ids = ids_of(3, 20)
    out = torch.full((2, 20, 40), torch.nan, device=device)
    gpu.multiply(inputs, weight, groups.group_rows(ids.to(device), 3, 16), out, entries_per_row=1, num_splits=2)
    expected = reference.grouped_linear(inputs.cpu().double(), weight.cpu().double(), ids[:, None])[:, 0]
    assert_close(out.sum(0).cpu()[ids >= 0], expected[ids >= 0])
    assert out.cpu()[:, ids < 0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, device: torch.device) -> None:
    inputs, weight = random(24, 128, dtype=dtype).to(device), random(3, 48, 128, dtype=dtype).to(device)
    ids = ids_of(3, 24, 1).clamp(min=0)
    result = gpu.grouped_linear(inputs, weight, ids.to(device))
    others, other_ids = random(25, 128, dtype=dtype)[:24].to(device), ids.clone()
    # The interpreter uses numpy, whose bits depend on a row's index in its block, so the row keeps its index there.
    place = 5 if device.type == "cpu" else 17
    others[place], other_ids[place] = inputs[5], ids[5]
    other_ids[20:] = (ids[20:] + 1) % 3
    assert torch.equal(gpu.grouped_linear(others, weight, other_ids.to(device))[place], result[5])


def test_wrong_inputs_are_named() -> None:
    inputs, weight, ids = torch.zeros(3, 8), torch.zeros(2, 5, 8), torch.zeros(3, 1, dtype=torch.int32)
    for call, name in (
        (lambda: grouped_linear(inputs, torch.zeros(2, 5, 7), ids), "inputs and weight must"),
        (lambda: grouped_linear(inputs.bfloat16(), weight, ids), "inputs and weight must"),
        (lambda: grouped_linear(inputs, torch.zeros(2, 8, 5).mT, ids), "last axis"),
        (lambda: grouped_linear(inputs, weight, ids[:, 0]), "group_ids must"),
        (lambda: grouped_linear(inputs, weight, ids.float()), "group_ids must"),
    ):
        with pytest.raises(KernelInputError, match=name):
            call()
    assert grouped_linear(inputs, weight, ids).shape == (3, 1, 5)
