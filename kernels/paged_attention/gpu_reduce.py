"""Kernel that reduces the splits of a decode row."""

# Pyright takes a kernel's constants and loops for objects of Triton.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_tile import empty_softmax_state, first_visible, fold, initial_softmax_state, split_keys, weighted_mean


@triton.jit(do_not_specialize=["window", "num_splits"], do_not_specialize_on_alignment=["seq_lens"])
def reduce_kernel(
    out,
    part_maximum,
    part_total,
    part_acc,
    seq_lens,
    sinks,
    window,
    num_splits,
    value_scale,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Run program ``(head, row)``: fold its splits in ascending order into ``out`` ``[B, H, DV]``.

    ``UNROLL`` splits are loaded together, so that a long row waits for memory a few times and not once per split. A
    split that the row does not have is folded in as an empty softmax.
    """
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    if seq_len < 0:  # no decode
        return
    first_key = first_visible(seq_len - 1, window, HAS_WINDOW)
    _, _, count = split_keys(first_key, seq_len, num_splits, BLOCK_N, SPLIT_LEN)
    row_head = row * tl.num_programs(0) + head
    dims = tl.arange(0, BLOCK_DV)
    is_row = tl.full([1], 1, tl.int1)
    heads = tl.zeros([1], tl.int32) + head
    maximum, total = initial_softmax_state(sinks, heads, is_row, 1)
    empty_maximum, _ = empty_softmax_state(1)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    for begin in tl.range(0, count, UNROLL):
        for offset in tl.static_range(UNROLL):
            split = begin + offset + tl.zeros([1], tl.int32)
            is_split = split < count
            part = row_head * num_splits + split
            new_maximum = tl.load(part_maximum + part, mask=is_split, other=0.0)
            new_total = tl.load(part_total + part, mask=is_split, other=0.0)
            new_acc = tl.load(
                part_acc + part[:, None] * VALUE_DIM + dims[None, :],
                mask=is_split[:, None] & (dims < VALUE_DIM)[None, :],
                other=0.0,
            )
            new_maximum = tl.where(is_split, new_maximum, empty_maximum)
            maximum, total, acc = fold(maximum, total, acc, new_maximum, new_total, new_acc)
    result = weighted_mean(total, acc, value_scale).to(out.dtype.element_ty)
    indices = row_head * VALUE_DIM + dims
    tl.store(out + indices[None, :], result, mask=(dims < VALUE_DIM)[None, :])
