"""Linear layers in bytes, in Triton, against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels.dispatch import KernelInputError
from penstock.kernels.quantized_linear import (
    QuantizedWeight,
    dequantize_weight,
    quantize_rows,
    quantize_weight,
    quantized_linear,
    reference,
)
from penstock.kernels.rotation import rotate

gpu = pytest.importorskip("penstock.kernels.quantized_linear.gpu", reason="needs triton")

BYTES = [torch.int8, torch.float8_e4m3fn]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of each kind of blocks, with edges on all sides.
SHAPES = [(1, 41, 7), (63, 256, 64), (130, 300, 40)]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BYTES, ids=str)
def test_rows_become_the_same_bytes(kind: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    inputs = torch.full((9, 3000), torch.nan, dtype=dtype)[:, 100:2700]
    inputs.copy_(random(9, 2600, dtype=dtype))
    inputs[2] = 0.0
    inputs[3] *= 1e-3
    inputs[4, 77] = 900.0  # compared to it the other elements are denormal in float8
    on_device = torch.full((9, 3000), torch.nan, dtype=dtype, device=device)[:, 100:2700]
    on_device.copy_(inputs)
    values, scales = gpu.quantize_rows(on_device, kind)
    expected_values, expected_scales = reference.quantize_rows(inputs, kind)
    assert torch.equal(scales.cpu(), expected_scales)
    assert torch.equal(values.cpu().float(), expected_values.float())


@pytest.mark.parametrize("size", [1, 6, 512, 576, 1500])
def test_rows_of_any_size_are_rotated_to_the_same_bytes(size: int, device: torch.device) -> None:
    inputs = random(5, size)
    values, scales = gpu.quantize_rows(inputs.to(device), torch.int8)
    expected_values, expected_scales = reference.quantize_rows(inputs, torch.int8)
    assert torch.equal(scales.cpu(), expected_scales)
    assert torch.equal(values.cpu(), expected_values)


@pytest.mark.parametrize("kind", BYTES, ids=str)
def test_steps_are_as_fine_as_the_largest_allows(kind: torch.dtype) -> None:
    inputs = random(5, 1000)
    values, scales = reference.quantize_rows(inputs, kind)
    inputs = rotate(inputs) if kind == torch.int8 else inputs
    largest = inputs.abs().amax(dim=-1, keepdim=True)
    assert ((values.float() * scales[:, None] - inputs).abs() <= largest / (254 if kind == torch.int8 else 28)).all()
    assert torch.equal(values.float().abs().amax(dim=-1), torch.full((5,), reference.LARGEST[kind]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BYTES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), SHAPES)
def test_the_product_of_bytes(
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    kind: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    bias = random(num_outputs, dtype=dtype) if num_rows > 1 else None
    weight = quantize_weight(random(num_outputs, num_inputs) * num_inputs**-0.5, kind, bias)
    rows, row_scales = reference.quantize_rows(random(num_rows, num_inputs, dtype=dtype), kind)
    arguments = (rows, row_scales, weight.values, weight.scales, bias)
    result = gpu.multiply(*(None if part is None else part.to(device) for part in arguments), dtype)
    # Sums of float8 keep 14 bits on Hopper's tensor cores, whatever is requested.
    result = result.half() if (kind, dtype) == (torch.float8_e4m3fn, torch.float32) else result
    assert_close(result.cpu(), reference.multiply(*arguments, torch.float64))


@pytest.mark.parametrize("kind", BYTES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(kind: torch.dtype, device: torch.device) -> None:
    weight = quantize_weight(random(40, 96), kind)
    values, scales = weight.values.to(device), weight.scales.to(device)
    rows, row_scales = gpu.quantize_rows(random(70, 96).to(device), kind)
    result = gpu.multiply(rows, row_scales, values, scales, None, torch.float32)
    # Sums of int8 are exact, however many rows there are; those of float8 may depend on how blocks are cut.
    num_rows = 3 if kind == torch.int8 else 66
    some = gpu.multiply(rows[:num_rows].contiguous(), row_scales[:num_rows], values, scales, None, torch.float32)
    assert torch.equal(some, result[:num_rows])


def test_it_is_near_the_linear_layer() -> None:
    """In int8 an outlier costs no precision, since rows are rotated. Without that the error would be 0.2."""
    inputs, weight, bias = random(20, 256), random(64, 256) / 16, random(64)
    inputs[:, 7], weight[:, 7] = 100, 0
    expected = inputs @ weight.T + bias
    for kind, most in ((torch.int8, 0.06), (torch.float8_e4m3fn, 0.06)):
        quantized = quantize_weight(weight, kind, bias)
        assert (dequantize_weight(quantized) - weight).norm() < 0.6 * most * weight.norm()
        result = quantized_linear(inputs, quantized)
        assert result.dtype == torch.float32
        assert (result - expected).norm() < most * expected.norm()


def test_wrong_inputs_are_named() -> None:
    weight = quantize_weight(torch.ones(5, 8), torch.int8)
    for call, name in (
        (lambda: quantize_rows(torch.zeros(8), torch.int8), "inputs must"),
        (lambda: quantize_rows(torch.zeros(3, 8), torch.int16), "dtype must"),
        (lambda: quantize_weight(torch.zeros(5, 8), torch.int8, torch.zeros(4)), "bias must"),
        (lambda: quantized_linear(torch.zeros(3, 7), weight), "inputs must"),
        (lambda: quantized_linear(torch.zeros(3, 8), QuantizedWeight(weight.values, torch.ones(4))), "weight must"),
    ):
        with pytest.raises(KernelInputError, match=name):
            call()
