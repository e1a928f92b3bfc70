"""Triton kernel for the GPU: one launch in place of three, for few rows.

A program computes some outputs of all rows, and reads every row whole, from a cache of the device. The factor of a
row's norm is known only at its end, and is the same for the whole row, so it multiplies the sums of the product. The
sum with the residual stream is written by each program in turn, a block each, to a tensor of its own, because the
other programs still read the terms.
"""

# Pyright checks the functions that Triton compiles as if Python ran them.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gated_activation.gpu import activated
from . import MAX_ROWS, reference

# The interpreter stores bfloat16 as bit patterns, which its dot would multiply as integers.
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Outputs of a program: few, so that a product of a small model occupies the device.
_OUTPUTS = 16
# Bytes of a row that a program reads at once.
_BLOCK_BYTES = 512


def normed_linear(
    hidden: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """See ``normed_linear.normed_linear``."""
    num_rows, size = hidden.shape
    if num_rows > MAX_ROWS:
        return reference.normed_linear(hidden, residual, norm_weight, eps, weight, bias, activation)
    num_outputs = weight.shape[0] // (1 if activation is None else 2)
    out = torch.empty(num_rows, num_outputs, dtype=hidden.dtype, device=hidden.device)
    sums = torch.empty(num_rows, size, dtype=hidden.dtype, device=hidden.device)
    if num_rows == 0:
        return out, sums
    block = _BLOCK_BYTES // hidden.itemsize
    _normed_linear_kernel[(triton.cdiv(num_outputs, _OUTPUTS),)](
        hidden.contiguous(), residual.contiguous(), norm_weight.contiguous(), weight, weight if bias is None else bias,
        out, sums, num_rows, num_outputs, eps,
        SIZE=size, HAS_BIAS=bias is not None, ACTIVATION=activation,
        ROWS=MAX_ROWS, OUTPUTS=_OUTPUTS, BLOCK=block, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, sums


@triton.jit
def _dot(rows, columns, total):
    if _IS_INTERPRETED and rows.dtype == tl.bfloat16:
        rows, columns = rows.to(tl.float32), columns.to(tl.float32)
    return tl.dot(rows, columns, total, input_precision="ieee")


# Specializing on num_rows would compile different code for a single row.
@triton.jit(do_not_specialize=["num_rows"])
def _normed_linear_kernel(
    hidden, residual, norm_weight, weight, bias, out, sums, num_rows, num_outputs, eps,
    SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype = out.dtype.element_ty
    program = tl.program_id(0)
    row = tl.arange(0, ROWS)[:, None]
    output = program * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    is_row, is_output = row < num_rows, output < num_outputs
    weight_pointers = weight + output.to(tl.int64) * SIZE
    up_pointers = weight + (output + num_outputs).to(tl.int64) * SIZE
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    up = tl.zeros((ROWS, OUTPUTS), tl.float32)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, SIZE, BLOCK):
        column = start + tl.arange(0, BLOCK)
        place, is_in, is_out = row * SIZE + column[None, :], is_row, is_output
        if SIZE % BLOCK != 0:
            is_in, is_out = is_in & (column[None, :] < SIZE), is_out & (column[:, None] < SIZE)
        terms = tl.load(hidden + place, mask=is_in, other=0.0).to(tl.float32)
        terms += tl.load(residual + place, mask=is_in, other=0.0).to(tl.float32)
        # Rounded like the sum that is written, as in a model that adds first.
        summed = terms.to(dtype)
        if (start // BLOCK) % tl.num_programs(0) == program:
            tl.store(sums + place, summed, mask=is_in)
        wide = summed.to(tl.float32)
        squares += wide * wide
        factors = tl.load(norm_weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
        rows = (wide * factors[None, :]).to(dtype)
        total = _dot(rows, tl.load(weight_pointers + column[:, None], mask=is_out, other=0.0), total)
        if ACTIVATION is not None:
            up = _dot(rows, tl.load(up_pointers + column[:, None], mask=is_out, other=0.0), up)
    factor = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / SIZE + eps)
    total *= factor
    up *= factor
    if HAS_BIAS:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
        if ACTIVATION is not None:
            up += tl.load(bias + num_outputs + output, mask=is_output, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        total = activated(total, ACTIVATION) * up
    tl.store(out + row * num_outputs + output, total.to(dtype), mask=is_row & is_output)
