"""Kernel for decode rows: one query token each, with keys cut into splits that run concurrently."""

# Pyright takes a kernel's constants and loops for objects of Triton.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_tile import (
    attend_keys,
    first_visible,
    initial_softmax_state,
    load_query,
    load_slopes,
    scales_of_head,
    split_keys,
    store_result,
    tile_rows,
)


@triton.jit(
    do_not_specialize=["table_stride", "window", "num_splits"],
    do_not_specialize_on_alignment=["block_table", "seq_lens"],
)
def decode_kernel(
    out, part_maximum, part_total, part_acc, query, key_cache, value_cache, key_scales, value_scales, block_table,
    seq_lens, sinks, slopes,
    query_stride_token, query_stride_head, query_stride_dim, table_stride, window, num_splits,
    score_scale, cap, value_scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLIT_LEN: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Run program ``(head block of a KV head, split, row)``.

    With ``IS_WHOLE`` there is one split, and its result is written to ``out`` ``[B, H, DV]``. Else the running softmax
    of the split is written to ``part_maximum`` and ``part_total`` ``[B, H, S]`` and ``part_acc`` ``[B, H, S, DV]``, all
    float32. Elements of splits that a row does not need, and rows with a negative length, are not written.
    """
    head_blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(0) // head_blocks
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    if seq_len < 0:  # no decode
        return
    first_key = first_visible(seq_len - 1, window, HAS_WINDOW)
    start, length, count = split_keys(first_key, seq_len, num_splits, BLOCK_N, SPLIT_LEN)
    # The first split of an empty row continues, because it may have to write the row's zeros.
    if (split >= count) & (split > 0):
        return

    _, group_heads, is_row = tile_rows(0, 1, tl.program_id(0) % head_blocks, BLOCK_M, HEADS, GROUP)
    heads = kv_head * GROUP + group_heads
    row_query = query + row * query_stride_token
    query_tile = load_query(row_query, heads, is_row, query_stride_head, query_stride_dim, HEAD_DIM, BLOCK_D)
    # With several splits, reduce_kernel adds the sinks.
    maximum, total = initial_softmax_state(sinks if IS_WHOLE else None, heads, is_row, BLOCK_M)
    begin = tl.maximum(start + split * length, first_key // BLOCK_N * BLOCK_N)
    end = tl.minimum(start + (split + 1) * length, seq_len)
    maximum, total, acc = attend_keys(
        (query_tile, tl.where(is_row, seq_len - 1, -1), load_slopes(slopes, heads, is_row, BLOCK_M)),
        (maximum, total, tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)),
        (
            key_cache + kv_head * HEAD_DIM,
            value_cache + kv_head * VALUE_DIM,
            block_table + row * table_stride,
            scales_of_head(key_scales, kv_head, HEAD_DIM),
            scales_of_head(value_scales, kv_head, VALUE_DIM),
        ),
        (window, score_scale, cap),
        begin, begin, end, first_key, seq_len,
        NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS * VALUE_DIM, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N,
        HAS_WINDOW, HAS_SOFTCAP, slopes is not None, False,
    )  # fmt: skip
    indices = row * NUM_KV_HEADS * GROUP + heads
    if IS_WHOLE:
        store_result(out, indices, is_row, total, acc, value_scale, VALUE_DIM, BLOCK_DV)
    else:
        parts = indices * num_splits + split
        _store_part(part_maximum, part_total, part_acc, parts, is_row, maximum, total, acc, VALUE_DIM, BLOCK_DV)


@triton.jit
def _store_part(
    part_maximum, part_total, part_acc, indices, is_row, maximum, total, acc,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Write the running softmax of a split; ``indices`` ``[M]`` are ``(row * H + head) * S + split``."""
    dims = tl.arange(0, BLOCK_DV)
    tl.store(part_maximum + indices, maximum, mask=is_row)
    tl.store(part_total + indices, total, mask=is_row)
    is_value = is_row[:, None] & (dims < VALUE_DIM)[None, :]
    tl.store(part_acc + indices[:, None] * VALUE_DIM + dims[None, :], acc, mask=is_value)
