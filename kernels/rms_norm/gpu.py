"""Triton kernel for the GPU: every row is read once, kept in registers for its sum and its scaling, and written once.

A program computes a block of whole rows, so the order of a row's sum does not depend on other rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference

_MAX_SIZE = 32768  # uses all 128 registers of 512 threads; twice the size would spill
_BLOCK_SIZE = 2048  # minimal number of elements per program, for wide loads


def rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``rms_norm.rms_norm``."""
    size = inputs.shape[-1]
    if size > _MAX_SIZE:
        return reference.rms_norm(inputs, weight, eps)
    out = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    if inputs.ndim != 3 or inputs.stride(2) != 1:
        inputs = _as_rows(inputs)[:, None]
    _launch(inputs, None, weight, out, eps)
    return out


def add_rms_norm(inputs: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``rms_norm.add_rms_norm``; the sum overwrites ``residual`` if its rows are contiguous."""
    if inputs.shape[-1] > _MAX_SIZE:
        return reference.add_rms_norm(inputs, residual, weight, eps)
    residual = _as_rows(residual)
    out = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    _launch(_as_rows(inputs)[:, None], residual, weight, out, eps)
    return out, residual


def _as_rows(inputs: Tensor) -> Tensor:
    """Return ``[N, E]`` with contiguous rows at any stride; a copy only if no such view exists."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(inputs: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    """Launch for ``inputs`` ``[T, N, E]`` at any strides, so that a slice of the heads needs no copy."""
    num_tokens, num_heads, size = inputs.shape
    num_rows = num_tokens * num_heads
    if num_rows == 0:
        return
    block = triton.next_power_of_2(size)
    rows_per_program = max(1, _BLOCK_SIZE // block)
    sums = inputs if residual is None else residual
    # The stride of a single row is arbitrary, and each new stride would compile the kernel again.
    token_stride = inputs.stride(0) if num_tokens > 1 else num_heads * size
    head_stride = inputs.stride(1) if num_heads > 1 else size
    sums_stride = sums.stride(0) if num_tokens > 1 else size
    constants: dict[str, Any] = {
        "SIZE": size,
        "NUM_HEADS": num_heads,
        "BLOCK": block,
        "ROWS": rows_per_program,
        "HAS_RESIDUAL": residual is not None,
        "IS_WIDE": weight.dtype != inputs.dtype,
        "num_warps": min(16, max(4, rows_per_program * block // 512)),
    }
    _rms_norm_kernel[(triton.cdiv(num_rows, rows_per_program),)](
        inputs, sums, weight.contiguous(), out,
        num_rows, weight.numel() // size, token_stride, head_stride, sums_stride, eps,
        **constants,
    )  # fmt: skip


# Specializing on num_rows would compile different code for a single row.
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    inputs,
    residual,
    weight,
    out,
    num_rows,
    num_weights,
    token_stride,
    head_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    dtype = inputs.dtype.element_ty
    row_numbers = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (row_numbers < num_rows) & (columns < SIZE)
    rows = row_numbers.to(tl.int64)
    starts = (rows // NUM_HEADS) * token_stride + (rows % NUM_HEADS) * head_stride
    wide = tl.load(inputs + starts + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        sums = residual + rows * residual_stride + columns
        # Rounded like the sum that is written, as in a model that adds first.
        narrow = (wide + tl.load(sums, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(sums, narrow, mask=mask)
        wide = narrow.to(tl.float32)
    variance = tl.sum(wide * wide, axis=1, keep_dims=True) / SIZE
    normed = wide * tl.rsqrt(variance + eps)
    if not IS_WIDE:
        normed = normed.to(dtype).to(tl.float32)
    weights = tl.load(weight + (row_numbers % num_weights) * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + rows * SIZE + columns, (normed * weights).to(dtype), mask=mask)
