"""Adapters in the compiled library's layout, against plain products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels import native
from penstock.kernels.dispatch import KernelInputError
from penstock.kernels.lora.packed import LoraPart, ProductStruct, add_packed_lora, can_pack_lora, pack_lora

from .test_native import DTYPES, random

pytestmark = pytest.mark.usefixtures("compiled")

NUM_SLOTS = 5


def make_parts(dtype: torch.dtype, num_inputs: int) -> dict[int, list[LoraPart]]:
    """Return parts by slot: three of odd sizes and ranks; the second; the last. Slots 3 and 4 are empty."""

    def part(first: int, num_outputs: int, rank: int) -> LoraPart:
        return LoraPart(first, random(rank, num_inputs, dtype=dtype), random(num_outputs, rank, dtype=dtype))

    whole = [part(0, 65, 3), part(65, 1, 17), part(66, 300, 8)]
    return {0: whole, 1: [part(65, 1, 64)], 2: [part(66, 300, 1)]}


def expected_of(inputs: Tensor, parts: dict[int, list[LoraPart]], token_lora: Tensor, out: Tensor) -> Tensor:
    expected = out.double().clone()
    for slot, of_slot in parts.items():
        rows = token_lora == slot
        for part in of_slot:
            between = (inputs[rows].double() @ part.a.double().T).to(inputs.dtype).double()
            expected[rows, part.first_output : part.first_output + len(part.b)] += between @ part.b.double().T
    return expected


@pytest.mark.parametrize("num_tokens", [1, 7, 230])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_gets_its_adapters_product(dtype: torch.dtype, num_tokens: int) -> None:
    """In runs longer than a piece of work, and rows that alternate; a row's bits are its own."""
    parts = make_parts(dtype, 96)
    packed = {slot: pack_lora(of_slot) for slot, of_slot in parts.items()}
    products = (ProductStruct * NUM_SLOTS)()
    for slot, one in packed.items():
        products[slot] = one.struct()
    inputs, out = random(num_tokens, 200, dtype=dtype)[:, 104:], random(num_tokens, 400, dtype=dtype)
    token_lora = torch.arange(num_tokens) * 7919 % (NUM_SLOTS + 1) - 1
    token_lora[100:] = 0
    result = out.clone()
    add_packed_lora(inputs, products, token_lora, result[:, :366])
    rtol, atol = (1e-5, 1e-4) if dtype is torch.float32 else (2e-2, 5e-2)
    expected = expected_of(inputs, parts, token_lora, out[:, :366])
    torch.testing.assert_close(result[:, :366].double(), expected, rtol=rtol, atol=atol)
    assert torch.equal(result[:, 366:], out[:, 366:])
    unchanged = (token_lora < 0) | (token_lora > 2)
    assert torch.equal(result[unchanged], out[unchanged])
    for token in range(0, num_tokens, 11):
        alone = out[token : token + 1].clone()
        add_packed_lora(inputs[token : token + 1], products, token_lora[token : token + 1].clone(), alone[:, :366])
        assert torch.equal(alone[0], result[token])


def test_sizes_that_do_not_fit_are_refused() -> None:
    parts = make_parts(torch.float32, 96)[0]
    products = (ProductStruct * 1)(pack_lora(parts).struct())
    inputs, out, ids = torch.zeros(2, 96), torch.zeros(2, 366), torch.zeros(2, dtype=torch.int64)
    for call, words in (
        (lambda: pack_lora([]), "1 to 4 parts"),
        (lambda: pack_lora([*parts, *parts]), "1 to 4 parts"),
        (lambda: add_packed_lora(inputs, products, ids.int(), out), "token_lora must be int64"),
        (lambda: add_packed_lora(inputs, products, ids[:1], out), "token_lora must be int64"),
        (lambda: add_packed_lora(inputs, products, ids, out.bfloat16()), "one dtype"),
        (lambda: add_packed_lora(inputs[:, ::2], products, ids, out), "rows contiguous"),
    ):
        with pytest.raises(KernelInputError, match=words):
            call()
    assert not can_pack_lora(5, torch.bfloat16)
    assert not can_pack_lora(6, torch.float16)
    native.unload()
    assert not can_pack_lora(6, torch.float32)
