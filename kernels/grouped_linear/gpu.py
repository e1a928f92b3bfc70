"""Triton kernel for the GPU: one launch for all groups, in blocks of rows of one group each."""

# Pyright checks the functions that Triton compiles as if Python ran them.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .gpu_groups import Groups, group_rows

# The interpreter stores bfloat16 as bit patterns, which its dot would multiply as integers.
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def grouped_linear(inputs: Tensor, weight: Tensor, group_ids: Tensor) -> Tensor:
    """See ``grouped_linear.grouped_linear``."""
    num_tokens, num_groups_each = group_ids.shape
    out = inputs.new_zeros(num_tokens * num_groups_each, weight.shape[1])
    groups = group_rows(group_ids, len(weight), rows_per_block(group_ids.numel(), len(weight)))
    multiply(inputs, weight, groups, out, entries_per_row=num_groups_each)
    return out.view(num_tokens, num_groups_each, -1)


def rows_per_block(num_entries: int, num_groups: int) -> int:
    """Return the average group size, at least the 16 rows of a tensor core and at most the 128 that registers hold."""
    return min(128, max(16, triton.next_power_of_2(triton.cdiv(num_entries, num_groups))))


@dataclass(frozen=True)
class _Blocks:
    """Block sizes of a product, besides the rows per block, which come from the grouping."""

    size_n: int
    size_k: int
    num_warps: int
    num_stages: int


def _choose_blocks(rows: int, itemsize: int, is_gated: bool) -> _Blocks:
    size_k = 128 // itemsize if rows > 16 else 256 // itemsize
    # float32 does not use tensor cores here, so larger accumulators spill registers.
    size_n = (128 if rows > 32 and not is_gated else 64) // (2 if itemsize == 4 else 1)
    return _Blocks(size_n, size_k, num_warps=8 if rows == 128 else 4, num_stages=3)


def multiply(
    inputs: Tensor,
    weight: Tensor,
    groups: Groups,
    out: Tensor,
    *,
    entries_per_row: int,
    is_gated: bool = False,
    is_added: bool = False,
    scale: float = 1.0,
    num_splits: int = 1,
) -> None:
    """Write, or add, ``scale`` times the product of each entry that has a group. Other rows of ``out`` stay unchanged.

    Args:
        inputs: ``[T, K]``; entry ``i`` multiplies row ``i // entries_per_row``.
        weight: ``[G, N, K]``; for a gated product ``[G, 2 * N, K]``, first the gate, which writes ``silu(gate) * up``
            of the float32 sums.
        out: ``[M, N]``, last axis contiguous; with splits ``[num_splits, M, N]`` float32, contiguous. **Mutated.**
        is_added: add to ``out`` instead of overwriting it.
        num_splits: number of parts that sums over ``K`` are split into, to fill a device with few blocks. The caller
            adds the parts.
    """
    num_outputs, num_inputs = weight.shape[1] // (2 if is_gated else 1), weight.shape[2]
    blocks = _choose_blocks(groups.block, inputs.element_size(), is_gated)
    num_tiles = triton.cdiv(num_outputs, blocks.size_n)
    if groups.max_blocks == 0:
        return
    split_k = triton.cdiv(triton.cdiv(num_inputs, num_splits), blocks.size_k) * blocks.size_k
    _grouped_kernel[(groups.max_blocks * num_tiles, num_splits)](
        inputs, weight, out, groups.order, groups.group_of_block, groups.num_blocks,
        inputs.stride(0), weight.stride(0), weight.stride(1), out.stride(-2),
        groups.num_entries, num_outputs, num_inputs, split_k, scale,
        ENTRIES_PER_ROW=entries_per_row, IS_GATED=is_gated, IS_ADDED=is_added,
        IS_EVEN=num_inputs % blocks.size_k == 0 and split_k * num_splits == num_inputs,
        BLOCK_M=groups.block, BLOCK_N=blocks.size_n, BLOCK_K=blocks.size_k,
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip


@triton.jit
def _dot(rows, columns, total):
    if _IS_INTERPRETED and rows.dtype == tl.bfloat16:
        rows, columns = rows.to(tl.float32), columns.to(tl.float32)
    return tl.dot(rows, columns, total, input_precision="ieee")


@triton.jit(do_not_specialize=["num_entries", "scale"])
def _grouped_kernel(
    inputs, weight, out, order, group_of_block, num_blocks,
    input_stride, group_stride, output_stride, out_stride,
    num_entries, num_outputs, num_inputs, split_k, scale,
    ENTRIES_PER_ROW: tl.constexpr, IS_GATED: tl.constexpr, IS_ADDED: tl.constexpr, IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(num_outputs, BLOCK_N)
    block, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    split = tl.program_id(1)
    # The grid has the maximal number of blocks, because only the device knows the actual number.
    if block < tl.load(num_blocks):
        entries = tl.load(order + block * BLOCK_M + tl.arange(0, BLOCK_M))
        is_row = entries < num_entries
        row = (entries // ENTRIES_PER_ROW).to(tl.int64)
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = column < num_outputs
        group = tl.load(group_of_block + block).to(tl.int64)
        row_pointers = inputs + row[:, None] * input_stride
        column_pointers = weight + group * group_stride + column[None, :].to(tl.int64) * output_stride
        up_pointers = column_pointers + num_outputs * output_stride
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, split_k, BLOCK_K):
            k = split * split_k + start + tl.arange(0, BLOCK_K)
            is_in = is_row[:, None]
            is_out = is_column[None, :]
            if not IS_EVEN:
                is_in = is_in & (k[None, :] < num_inputs)
                is_out = is_out & (k[:, None] < num_inputs)
            rows = tl.load(row_pointers + k[None, :], mask=is_in, other=0.0)
            columns = tl.load(column_pointers + k[:, None], mask=is_out, other=0.0)
            total = _dot(rows, columns, total)
            if IS_GATED:
                columns = tl.load(up_pointers + k[:, None], mask=is_out, other=0.0)
                up = _dot(rows, columns, up)
        if IS_GATED:
            total = total / (1.0 + tl.exp(-total)) * up
        total = total * scale
        out_row = split.to(tl.int64) * num_entries + entries.to(tl.int64)
        pointers = out + out_row[:, None] * out_stride + column[None, :]
        is_written = is_row[:, None] & is_column[None, :]
        if IS_ADDED:
            total += tl.load(pointers, mask=is_written, other=0.0).to(tl.float32)
        tl.store(pointers, total.to(out.dtype.element_ty), mask=is_written)
