"""Products with the numbers of quantized files as they are, against the same weights in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels import native
from penstock.kernels.linear import join_weights, linear, pack_blocks, split_weight, unpack_weight
from penstock.kernels.linear.blocks import BlockForm, Blocks

from .test_native import DTYPES, random
from .test_tiles import HIDDEN, logits_of, one_layer

pytestmark = pytest.mark.usefixtures("compiled")

FORMS = [
    BlockForm(bits, num_inputs, has_minimums)
    for bits, num_inputs in ((4, 32), (5, 32), (8, 32), (4, 16), (6, 16), (8, 16))
    for has_minimums in (False, True)
]


@pytest.fixture
def three_threads() -> Iterator[None]:
    native.set_num_threads(3)
    yield
    native.set_num_threads(1)


def draw(form: BlockForm, num_outputs: int, num_inputs: int) -> Blocks:
    generator = torch.Generator().manual_seed(num_outputs)
    numbers = torch.randint(0, 1 << form.bits, (num_outputs, num_inputs), generator=generator, dtype=torch.uint8)
    scales = random(num_outputs, num_inputs // form.num_inputs, dtype=torch.float16) / 50
    # Denormal, and zero.
    scales[0, 0], scales[-1, -1] = 3e-7, 0
    minimums = random(num_outputs, scales.shape[1] + 1, dtype=torch.float16)[:, 1:] if form.has_minimums else None
    return Blocks(form, numbers, scales, minimums)


def plain(blocks: Blocks) -> Tensor:
    """Return the weight in float64."""
    form, size = blocks.form, blocks.form.num_inputs
    scales = blocks.scales.double().repeat_interleave(size, 1)
    if blocks.minimums is not None:
        return scales * blocks.numbers.double() + blocks.minimums.double().repeat_interleave(size, 1)
    return scales * (blocks.numbers.double() - form.zero)


def rounded(inputs: Tensor, size: int) -> Tensor:
    """Return the inputs as the kernel rounds them, with a step per block."""
    blocks = inputs.float().unflatten(1, (-1, size))
    largest = blocks.abs().amax(-1, keepdim=True)
    return ((blocks * (127 / largest)).round().double() * (largest / 127).double()).flatten(1)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 32), (63, 96), (401, 640)])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_dequantized_weight(
    dtype: torch.dtype, form: BlockForm, num_outputs: int, num_inputs: int, three_threads: None
) -> None:
    blocks, bias = draw(form, num_outputs, num_inputs), random(num_outputs, dtype=dtype)
    packed, weight = pack_blocks([blocks], bias), plain(blocks)
    torch.testing.assert_close(unpack_weight(packed).double(), weight, rtol=1e-6, atol=1e-6)
    halves = 32 if form.has_minimums else 16
    assert 8 * packed.packed.nbytes == -(-num_outputs // 64) * 64 * num_inputs * (form.bits + halves / form.num_inputs)
    for num_tokens in (1, 2, 16, 64, 203):
        inputs = random(num_tokens, 2 * num_inputs, dtype=dtype)[:, num_inputs:]
        expected = rounded(inputs, form.num_inputs) @ weight.T + bias.double()
        actual = linear(inputs, packed)
        assert actual.dtype is dtype
        assert (actual.double() - expected).norm() < (1e-5 if dtype is torch.float32 else 4e-3) * expected.norm()
        for token in range(min(num_tokens, 7)):
            assert torch.equal(linear(inputs[token], packed), actual[token])


def test_parts_of_different_forms_become_one_weight() -> None:
    """Queries, keys and values of a file may have different types."""
    parts = [draw(form, 65 + index, 64) for index, form in enumerate(FORMS)]
    packed = pack_blocks(parts)
    assert packed.blocks == BlockForm(8, 16, True)
    weight = torch.cat([plain(part) for part in parts])
    torch.testing.assert_close(unpack_weight(packed).double(), weight, rtol=1e-5, atol=1e-5)
    without = [part for part in parts if not part.form.has_minimums]
    packed = pack_blocks(without)
    assert packed.blocks == BlockForm(8, 16, False)
    expected = torch.cat([plain(part) for part in without])
    torch.testing.assert_close(unpack_weight(packed).double(), expected, rtol=1e-6, atol=1e-6)


def test_a_weight_is_split_and_joined() -> None:
    packed = pack_blocks([draw(FORMS[1], 200, 64)])
    pieces = split_weight(packed, [64, 128, 8])
    inputs = random(5, 64, dtype=torch.float32)
    whole = linear(inputs, packed)
    assert torch.equal(torch.cat([linear(inputs, piece) for piece in pieces], 1), whole)
    assert torch.equal(linear(inputs, join_weights(pieces)), whole)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decoder_reads_embeddings_from_its_head(dtype: torch.dtype, form: BlockForm) -> None:
    weights = replace(one_layer(None, dtype), lm_head=pack_blocks([draw(form, 70, HIDDEN)]))
    assert weights.lm_head is not None
    table = unpack_weight(weights.lm_head).to(dtype)
    expected = logits_of(replace(weights, embeddings=table), 16, [30])
    unread = torch.full_like(table, torch.nan)
    actual = logits_of(replace(weights, embeddings=unread, embeds_by_head=True), 16, [30])
    assert actual.isfinite().all()
    assert torch.equal(actual, expected)


def test_zeros_and_an_outlier() -> None:
    blocks = draw(FORMS[0], 70, 64)
    inputs = torch.zeros(2, 64)
    inputs[1, 5] = 1e6
    expected = inputs.double() @ plain(blocks).T
    torch.testing.assert_close(linear(inputs, pack_blocks([blocks])).double(), expected, rtol=1e-5, atol=1e-6)
