"""Products with packed weights, in every form that they are held in, against plain ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels import native
from penstock.kernels.dispatch import KernelInputError
from penstock.kernels.linear import (
    PackedWeight,
    can_pack,
    can_quantize,
    join_weights,
    linear,
    pack_weight,
    quantize_weight,
    quantize_weight_to_nibbles,
    split_weight,
    unpack_weight,
)
from penstock.kernels.linear.feedback import error_feedback
from penstock.kernels.rotation import rotate

from .test_native import DTYPES, random

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 2), (63, 10), (64, 64), (65, 130), (401, 600)])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 6, 7, 13, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype: torch.dtype, num_tokens: int, num_outputs: int, num_inputs: int, has_bias: bool) -> None:
    weight = random(num_outputs, num_inputs, dtype=dtype)
    bias = random(num_outputs, dtype=dtype) if has_bias else None
    packed = pack_weight(weight, bias)
    assert torch.equal(unpack_weight(packed), weight)
    inputs = random(num_tokens, 2 * num_inputs, dtype=dtype)[:, num_inputs:]
    actual = linear(inputs, packed)
    expected = torch.nn.functional.linear(inputs.double(), weight.double(), None if bias is None else bias.double())
    rtol, atol = (1e-5, 1e-4) if dtype is torch.float32 else (2e-2, 2e-2)
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)
    for token in range(min(num_tokens, 13)):
        assert torch.equal(linear(inputs[token], packed), actual[token])


# Fewer rows than share a panel's reading, as many as a block has, several blocks, more than a thread takes at once.
@pytest.mark.parametrize("num_tokens", [1, 5, 12, 29, 250])
@pytest.mark.parametrize("num_outputs", [33, 300])
def test_pairs_that_are_widened_are_added_one_by_one(num_outputs: int, num_tokens: int) -> None:
    """In float32, each product fused: a product of two bfloat16 is a float32, so plain sums are the same bits."""
    library = native.loaded()
    assert library is not None
    if library.instructions not in ("avx512", "avx2", "neon"):
        pytest.skip(f"{library.instructions} is not made of products of floats")
    weight, bias = random(num_outputs, 50, dtype=torch.bfloat16), random(num_outputs, dtype=torch.bfloat16)
    inputs = random(num_tokens, 50, dtype=torch.bfloat16)
    expected = bias.float().expand(num_tokens, -1)
    for column in range(50):
        expected = expected + inputs[:, column, None].float() * weight[:, column].float()
    try:
        for num_threads in (1, 3):
            native.set_num_threads(num_threads)
            assert torch.equal(linear(inputs, pack_weight(weight, bias)), expected.bfloat16())
    finally:
        native.set_num_threads(1)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 4), (63, 12), (65, 132), (401, 600)])
@pytest.mark.parametrize("num_tokens", [1, 5, 7, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_in_bytes(
    dtype: torch.dtype, num_tokens: int, num_outputs: int, num_inputs: int, has_bias: bool
) -> None:
    weight, inputs = random(num_outputs, num_inputs, dtype=dtype), random(num_tokens, num_inputs, dtype=dtype)
    bias = random(num_outputs, dtype=dtype) if has_bias else None
    packed = quantize_weight(weight, bias)
    # The bytes are those of the rotated rows, whose bits are the same as in torch.
    rotated = rotate(weight)
    steps = rotated.abs().amax(1, keepdim=True) / 127
    values = packed.packed.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)[:num_outputs]
    assert torch.equal(values.float(), (rotated / steps).round())
    torch.testing.assert_close(unpack_weight(packed), rotate(values.float() * steps))
    check_product(inputs, packed, bias)


def test_an_outlier_in_the_inputs_costs_little_precision() -> None:
    """Its weights are zero, so only the step of its row counts: without a rotation the error would be 0.9.

    In four bits its rotated weights are rounded, and feedback keeps their sum.
    """
    weight, inputs = random(100, 576, dtype=torch.float32), random(20, 576, dtype=torch.float32)
    inputs[:, 77] = 200
    weight[:, 77] = 0
    expected = inputs.double() @ weight.double().T
    nibbles = quantize_weight_to_nibbles(weight, feedback=error_feedback(inputs))
    for packed, bound in ((quantize_weight(weight), 0.1), (nibbles, 0.15)):
        actual = linear(inputs, packed).double()
        assert (actual - expected).norm() < bound * expected.norm()


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 3), (65, 132), (401, 600)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_in_four_bits(dtype: torch.dtype, num_outputs: int, num_inputs: int) -> None:
    weight, inputs = random(num_outputs, num_inputs, dtype=dtype), random(130, num_inputs, dtype=dtype)
    # The rotation spreads an outlier over its row.
    weight[num_outputs // 2, 0] = 20
    bias = random(num_outputs, dtype=dtype)
    packed = quantize_weight_to_nibbles(weight, bias)
    difference = (unpack_weight(packed) - weight.float()).norm(dim=1) / weight.float().norm(dim=1)
    assert difference.median() < 0.085
    assert difference.max() < 0.15
    for num_tokens in (1, 5, 130):
        check_product(inputs[:num_tokens], packed, bias)


def test_numbers_that_four_bits_can_hold_are_exact() -> None:
    """Steps and zeros of every size, a row of zeros, and one without negative weights, with feedback and without."""
    steps = torch.arange(1, 16).repeat(5)[:64, None]
    zeros = (torch.arange(64)[:, None] * 7 % 9).expand(64, 32)
    nibbles = torch.arange(32).expand(64, 32) % 16
    block = (steps * (nibbles - zeros)).clamp(-127, 127)
    # The scale of a row follows from its largest weight; this one makes it 1.
    scaling = torch.zeros(64, 32)
    scaling[:, 0] = 127
    weight = torch.cat([block.float(), scaling], 1)
    weight[5], weight[6] = 0, weight[6].abs()
    fits = ((block >= -127) & (block < 127)).all(1)
    for feedback in (None, error_feedback(correlated_rows(200, 64))):
        result = rotate(unpack_weight(quantize_weight_to_nibbles(rotate(weight), feedback=feedback)))
        assert (result[5] == 0).all()
        difference = (result - weight)[:, :32].abs().amax(1)
        assert (difference[fits] < 1e-3).float().mean() > 0.9
        if feedback is None:
            assert (difference <= steps[:, 0] / 2 + 1).all()


def correlated_rows(num_rows: int, size: int) -> Tensor:
    """Return rows with a few large directions, as inputs of layers have."""
    return random(num_rows, size, dtype=torch.float32) @ (
        random(size, size, dtype=torch.float32) * torch.logspace(0, -2, size)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(65, 33), (70, 100), (130, 600)])
def test_feedback_of_errors(dtype: torch.dtype, num_outputs: int, num_inputs: int) -> None:
    """Its coefficients factor the matrix of inputs, and products with such inputs have half the error or less."""
    weight, examples = random(num_outputs, num_inputs, dtype=dtype), correlated_rows(700, num_inputs).to(dtype)
    feedback = error_feedback(examples)
    assert feedback is not None
    rows = rotate(examples).double()
    hessian = rows.T @ rows
    hessian.diagonal().add_((0.01 + 0.05 * num_inputs / 700) * hessian.diagonal().mean())
    importance, upper = feedback.diagonal().double(), feedback.double().clone()
    upper.diagonal().fill_(1.0)
    torch.testing.assert_close((upper * importance) @ upper.T, hessian, rtol=1e-4, atol=1e-4 * float(hessian.max()))
    inputs = correlated_rows(700, num_inputs)
    expected = inputs @ weight.float().T
    fed = quantize_weight_to_nibbles(weight, feedback=feedback)
    errors = [(inputs @ unpack_weight(one).T - expected).norm() for one in (fed, quantize_weight_to_nibbles(weight))]
    assert errors[0] < 0.6 * errors[1]
    check_product(examples[:7], fed, None)


def test_feedback_of_unusual_examples() -> None:
    """Zeros and infinities give none, one row gives one, and a wrong shape is named."""
    assert error_feedback(torch.zeros(4, 32)) is None
    assert error_feedback(torch.full((4, 32), torch.inf)) is None
    weight = random(64, 32, dtype=torch.float32)
    feedback = error_feedback(torch.ones(1, 32))
    difference = unpack_weight(quantize_weight_to_nibbles(weight, feedback=feedback)) - weight
    assert difference.norm() < 0.15 * weight.norm()
    with pytest.raises(KernelInputError, match=r"feedback must be contiguous float32 \[33, 33\]"):
        quantize_weight_to_nibbles(random(64, 33, dtype=torch.float32), feedback=feedback)
    with pytest.raises(KernelInputError, match="examples must be"):
        error_feedback(torch.ones(4, 32, dtype=torch.float16))


def check_product(inputs: Tensor, packed: PackedWeight, bias: Tensor | None) -> None:
    """Against the same bytes without rounding after them, and row by row."""
    dtype, num_tokens = inputs.dtype, len(inputs)
    rows, plain = rotate(inputs), rotate(unpack_weight(packed))
    input_steps = rows.abs().amax(1, keepdim=True) / 127
    rounded = (rows / input_steps).round().double() * input_steps.double()
    expected = rounded @ plain.double().T + (0 if bias is None else bias.double())
    rtol, atol = (1e-5, 1e-4) if dtype is torch.float32 else (2e-2, 2e-2)
    actual = linear(inputs, packed)
    assert actual.dtype is dtype
    # A value in the middle between two steps may have gone either way.
    is_far = (actual.double() - expected).abs() > atol + rtol * expected.abs()
    assert is_far.float().mean() < 0.02
    assert (actual.double() - expected).norm() < 0.01 * expected.norm()
    for token in range(min(num_tokens, 7)):
        assert torch.equal(linear(inputs[token], packed), actual[token])


def test_zeros_in_bytes_are_zeros() -> None:
    packed = quantize_weight(torch.zeros(3, 8))
    assert torch.equal(linear(torch.zeros(2, 8), packed), torch.zeros(2, 3))
    assert not can_quantize(torch.zeros(3, 6))
    with pytest.raises(KernelInputError, match="in bytes here"):
        quantize_weight(torch.zeros(3, 6))


def test_unsupported_inputs_of_linear_are_named() -> None:
    for weight in (torch.zeros(4, 6, dtype=torch.float16), torch.zeros(4, 5, dtype=torch.bfloat16)):
        assert not can_pack(weight)
        with pytest.raises(KernelInputError, match="cannot be packed"):
            pack_weight(weight)
    packed = pack_weight(torch.zeros(4, 6, dtype=torch.bfloat16))
    for inputs in (torch.zeros(2, 6), torch.zeros(2, 4, dtype=torch.bfloat16)):
        with pytest.raises(KernelInputError, match=r"inputs must be torch\.bfloat16"):
            linear(inputs, packed)


@pytest.mark.parametrize("pack", [pack_weight, quantize_weight, quantize_weight_to_nibbles])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_have_no_results(dtype: torch.dtype, pack: Callable[[Tensor], PackedWeight]) -> None:
    """Such as an expert to which no token of a step goes."""
    packed = pack(random(130, 64, dtype=dtype))
    assert linear(torch.empty(0, 64, dtype=dtype), packed).shape == (0, 130)


@pytest.mark.parametrize("pack", [pack_weight, quantize_weight, quantize_weight_to_nibbles])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_computes_the_same(dtype: torch.dtype, pack: Callable[[Tensor], PackedWeight]) -> None:
    """However outputs and rows are cut: a panel to each thread, and of eleven panels some are left."""
    packed, inputs = pack(random(700, 600, dtype=dtype)), random(100, 600, dtype=dtype)
    expected = linear(inputs, packed)
    try:
        for num_threads in (2, 5, 1, 3):
            native.set_num_threads(num_threads)
            for num_rows in (1, 20, 100) * 5:
                assert torch.equal(linear(inputs[:num_rows], packed), expected[:num_rows])
    finally:
        native.set_num_threads(1)


@pytest.mark.parametrize("pack", [pack_weight, quantize_weight, quantize_weight_to_nibbles])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_side_by_side_are_one(dtype: torch.dtype, pack: Callable[[Tensor, Tensor], PackedWeight]) -> None:
    plain, bias, inputs = random(200, 96, dtype=dtype), torch.rand(200), random(7, 96, dtype=dtype)
    whole = pack(plain, bias)
    expected = linear(inputs, whole)
    parts = split_weight(whole, [64, 128, 8])
    assert torch.equal(torch.cat([linear(inputs, part) for part in parts], 1), expected)
    joined = join_weights(parts)
    assert joined.packed.data_ptr() == whole.packed.data_ptr()
    assert torch.equal(linear(inputs, joined), expected)
    # Made one by one they lie apart, and are brought together.
    apart = [pack(*both) for both in zip(plain.split([64, 128, 8]), bias.split([64, 128, 8]), strict=True)]
    assert torch.equal(linear(inputs, join_weights(apart)), expected)
    with pytest.raises(KernelInputError, match="num_outputs must be multiples of 64"):
        split_weight(whole, [8, 192])
    with pytest.raises(KernelInputError, match="whole panels"):
        join_weights([parts[2], parts[0]])


def test_a_part_without_a_bias_adds_none() -> None:
    first, second, inputs = torch.rand(64, 8), torch.rand(64, 8), torch.rand(3, 8)
    joined = join_weights([pack_weight(first), pack_weight(second, torch.ones(64))])
    expected = torch.cat([linear(inputs, pack_weight(first)), linear(inputs, pack_weight(second)) + 1], 1)
    torch.testing.assert_close(linear(inputs, joined), expected)
