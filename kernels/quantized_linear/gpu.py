"""Triton kernels for the GPU: quantization of rows, and their product on the tensor cores."""

# Pyright checks the functions that Triton compiles as if Python ran them.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rotation import BLOCK
from .reference import LARGEST

# The interpreter's conversion to float8 loses the carry when rounding reaches the next power of two.
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_QUANTIZE_BLOCK = 2048
# Hopper's float8 sums keep 14 bits. After this many products they are added in float32 (arXiv:2412.19437, 3.3.2).
_FLOAT8_SUMS = tl.constexpr(128)


@dataclass(frozen=True)
class _Blocks:
    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def _choose_blocks(num_rows: int) -> _Blocks:
    """Return small blocks, which stream the weight, for few rows; else the largest whose sums fit into registers."""
    if num_rows <= 16:
        return _Blocks(16, 32, 256, num_warps=4, num_stages=4)
    if num_rows <= 64:
        return _Blocks(64, 64, 128, num_warps=4, num_stages=4)
    return _Blocks(128, 128, 128, num_warps=8, num_stages=3)


def quantize_rows(inputs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See ``quantized_linear.quantize_rows``."""
    num_rows, size = inputs.shape
    values = torch.empty(num_rows, size, dtype=dtype, device=inputs.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=inputs.device)
    if num_rows and dtype == torch.int8:
        rotated = torch.empty(num_rows, size, dtype=torch.float32, device=inputs.device)
        _rotate_kernel[(num_rows, triton.cdiv(size, BLOCK))](
            inputs, inputs.stride(0), rotated, size, STAGES=BLOCK.bit_length() - 1, BLOCK=BLOCK, num_warps=4
        )
        inputs = rotated
    if num_rows:
        block = min(_QUANTIZE_BLOCK, triton.next_power_of_2(size))
        _quantize_kernel[(num_rows,)](
            inputs, inputs.stride(0), values, scales, size,
            LARGEST=LARGEST[dtype], IS_INT8=dtype == torch.int8, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return values, scales


def multiply(
    rows: Tensor, row_scales: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the product of ``[T, K]`` and ``[N, K]``, both quantized, in ``dtype``."""
    num_rows, num_inputs = rows.shape
    num_outputs = len(values)
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=rows.device)
    if not num_rows:
        return out
    blocks = _choose_blocks(num_rows)
    grid = (triton.cdiv(num_rows, blocks.rows) * triton.cdiv(num_outputs, blocks.outputs),)
    _multiply_kernel[grid](
        rows, row_scales, values, scales, scales if bias is None else bias.contiguous(), out,
        num_rows, num_outputs, num_inputs,
        IS_INT8=values.dtype == torch.int8, HAS_BIAS=bias is not None, IS_EVEN=num_inputs % blocks.inputs == 0,
        BLOCK_M=blocks.rows, BLOCK_N=blocks.outputs, BLOCK_K=blocks.inputs,
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip
    return out


@triton.jit
def _rotate_kernel(inputs, stride, rotated, size, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    """Rotate a block of a row. If fewer than ``BLOCK`` elements are left, each power of two of their number is rotated.

    An element's place xor their number has as its highest bit the size of the power of two that the element is in.
    """
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    place = tl.arange(0, BLOCK)
    num = tl.minimum(size - start, BLOCK)
    is_in = place < num
    values = tl.load(inputs + row * stride + start + place, mask=is_in, other=0.0).to(tl.float32)
    part = place ^ num
    part_size = tl.zeros((BLOCK,), tl.float32) + 1.0
    for stage in tl.static_range(STAGES):
        # Spelled out in each place, because Triton gives a name of a constant only one value.
        pairs = tl.permute(tl.reshape(values, (BLOCK // (2 << stage), 2, 1 << stage)), (0, 2, 1))
        first, second = tl.split(pairs)
        pairs = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
        is_rotated = part >= (2 << stage)
        values = tl.where(is_rotated, tl.reshape(pairs, (BLOCK,)), values)
        part_size = tl.where(is_rotated, 1.0 * (2 << stage), part_size)
    values *= tl.div_rn(tl.zeros((BLOCK,), tl.float32) + 1.0, tl.sqrt_rn(part_size))
    tl.store(rotated + row * size + start + place, values, mask=is_in)


@triton.jit
def _quantize_kernel(
    inputs, stride, values, scales, size, LARGEST: tl.constexpr, IS_INT8: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Quantize one row. It is read twice: for its largest magnitude, and to quantize it."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        block = tl.load(inputs + row * stride + column, mask=column < size, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(block))
    row_largest = tl.max(largest, 0)
    scale = tl.where(row_largest > 0.0, tl.div_rn(row_largest, LARGEST), 1.0)
    tl.store(scales + row, scale)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        block = tl.load(inputs + row * stride + column, mask=column < size, other=0.0).to(tl.float32)
        steps = tl.div_rn(block, tl.zeros((BLOCK,), tl.float32) + scale)
        if IS_INT8:
            steps = tl.floor(steps + 0.5)
        steps = tl.minimum(tl.maximum(steps, -LARGEST), LARGEST)
        if _IS_INTERPRETED and not IS_INT8:
            steps = _round_to_float8(steps)
        tl.store(values + row * size + column, steps.to(values.dtype.element_ty), mask=column < size)


@triton.jit
def _round_to_float8(value):
    """Round to the nearest float8_e4m3fn, ties to even: 3 bits of mantissa, or steps of 2^-9 below 2^-6."""
    bits = value.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    # Adding 1.5 * 2^14 leaves steps of 2^-9, so the addition rounds.
    small = (value + 24576.0) - 24576.0
    return tl.where(tl.abs(value) < 0.015625, small, bits.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_kernel(
    rows, row_scales, values, scales, bias, out, num_rows, num_outputs, num_inputs,
    IS_INT8: tl.constexpr, HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a block of the product. Blocks of the same outputs run concurrently, so their weights are read once."""
    num_row_blocks = tl.cdiv(num_rows, BLOCK_M)
    row = (tl.program_id(0) % num_row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = (tl.program_id(0) // num_row_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = row < num_rows, output < num_outputs
    row_pointers = rows + row[:, None].to(tl.int64) * num_inputs
    value_pointers = values + output[None, :].to(tl.int64) * num_inputs
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if IS_INT8 else tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_in, is_out = is_row[:, None], is_output[None, :]
        if not IS_EVEN:
            is_in, is_out = is_in & (k[None, :] < num_inputs), is_out & (k[:, None] < num_inputs)
        left = tl.load(row_pointers + k[None, :], mask=is_in, other=0.0)
        right = tl.load(value_pointers + k[:, None], mask=is_out, other=0.0)
        if IS_INT8:
            total = tl.dot(left, right, total, out_dtype=tl.int32)
        else:
            total = tl.dot(left, right, total, max_num_imprecise_acc=_FLOAT8_SUMS)
    row_scale = tl.load(row_scales + row, mask=is_row, other=0.0)
    scale = tl.load(scales + output, mask=is_output, other=0.0)
    result = total.to(tl.float32) * row_scale[:, None] * scale[None, :]
    if HAS_BIAS:
        result += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    pointers = out + row[:, None].to(tl.int64) * num_outputs + output[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
