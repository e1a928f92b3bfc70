"""Kernel for rows of any number of query tokens: prefill, chunked prefill and decode in one launch."""

# Pyright takes a kernel's constants and loops for objects of Triton.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_tile import (
    attend_keys,
    empty_softmax_state,
    first_visible,
    fold,
    initial_softmax_state,
    load_query,
    load_slopes,
    scales_of_head,
    store_result,
    tile_rows,
)


@triton.jit
def _row_of_block(query_starts, block, first_row, num_rows, BLOCK_Q: tl.constexpr):
    """Return the row of query block ``block``, and the index of the block within the row.

    The blocks of row ``r`` begin at ``(start of r) // BLOCK_Q + r``, counted from ``first_row``. These are always
    enough, and the grid follows from the numbers of tokens and rows. A surplus block begins after the end of its row.
    """
    first_start = tl.load(query_starts + first_row)
    low = first_row
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(query_starts + middle) - first_start
        if start // BLOCK_Q + middle - first_row <= block:
            low = middle
        else:
            high = middle
    start = tl.load(query_starts + low) - first_start
    return low, block - (start // BLOCK_Q + low - first_row)


@triton.jit
def _attend_in_parts(
    rows, softmax, cache, scoring, begin, first_key, stop,
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_LEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """Attend to each part of keys between two multiples of ``SPLIT_LEN`` separately, and fold the parts in order."""
    maximum, total, acc = softmax
    for split_start in tl.range(begin // SPLIT_LEN * SPLIT_LEN, stop, SPLIT_LEN):
        empty_maximum, empty_total = empty_softmax_state(acc.shape[0])
        empty = (empty_maximum, empty_total, tl.zeros([acc.shape[0], acc.shape[1]], tl.float32))
        split_begin = tl.maximum(split_start, begin)
        split_end = tl.minimum(split_start + SPLIT_LEN, stop)
        part_maximum, part_total, part_acc = attend_keys(
            rows, empty, cache, scoring, split_begin, split_begin, split_end, first_key, stop,
            KEY_STRIDE, VALUE_STRIDE, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N,
            HAS_WINDOW, HAS_SOFTCAP, HAS_SLOPES, False,
        )  # fmt: skip
        maximum, total, acc = fold(maximum, total, acc, part_maximum, part_total, part_acc)
    return maximum, total, acc


@triton.jit(
    do_not_specialize=["table_stride", "window", "first_row", "num_rows"],
    do_not_specialize_on_alignment=["block_table", "query_starts", "seq_lens"],
)
def varlen_kernel(
    out, query, key_cache, value_cache, key_scales, value_scales, block_table, query_starts, seq_lens, sinks, slopes,
    query_stride_token, query_stride_head, query_stride_dim, table_stride, window, first_row, num_rows,
    score_scale, cap, value_scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLIT_LEN: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SKIPS_DECODES: tl.constexpr,
):  # fmt: skip
    """Run program ``(query block, head block of a KV head)`` of rows ``first_row .. num_rows``, into ``out``.

    With ``SKIPS_DECODES`` rows of one token are not written. Blocks that see the most keys start first. With a
    ``SPLIT_LEN`` the keys between two multiples of it are processed separately and then folded in, with the same
    operations as in ``decode_kernel`` and ``reduce_kernel``.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    head_blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    row, block = _row_of_block(query_starts, block, first_row, num_rows, BLOCK_Q)
    query_start = tl.load(query_starts + row)
    query_len = tl.load(query_starts + row + 1) - query_start
    first_token = block * BLOCK_Q
    if (first_token >= query_len) | (SKIPS_DECODES & (query_len == 1)):
        return

    seq_len = tl.load(seq_lens + row)
    kv_head = tl.program_id(1) // head_blocks
    tokens, heads, is_row = tile_rows(first_token, query_len, tl.program_id(1) % head_blocks, BLOCK_M, HEADS, GROUP)
    heads += kv_head * GROUP
    packed = (query_start + tokens).to(tl.int64)
    starts = query + packed[:, None] * query_stride_token
    query_tile = load_query(starts, heads, is_row, query_stride_head, query_stride_dim, HEAD_DIM, BLOCK_D)
    positions = tl.where(is_row, seq_len - query_len + tokens, -1)
    rows = (query_tile, positions, load_slopes(slopes, heads, is_row, BLOCK_M))
    table = block_table + row.to(tl.int64) * table_stride
    cache = (
        key_cache + kv_head * HEAD_DIM,
        value_cache + kv_head * VALUE_DIM,
        table,
        scales_of_head(key_scales, kv_head, HEAD_DIM),
        scales_of_head(value_scales, kv_head, VALUE_DIM),
    )
    scoring = (window, score_scale, cap)
    maximum, total = initial_softmax_state(sinks, heads, is_row, BLOCK_M)
    softmax = (maximum, total, tl.zeros([BLOCK_M, BLOCK_DV], tl.float32))

    first_position = seq_len - query_len + first_token
    stop = tl.minimum(first_position + BLOCK_Q, seq_len)
    first_key = first_visible(first_position, window, HAS_WINDOW)
    begin = first_key // BLOCK_N * BLOCK_N
    if SPLIT_LEN == 0:
        unmasked_stop = (first_position + 1) // BLOCK_N * BLOCK_N
        middle = begin if HAS_WINDOW else unmasked_stop
        maximum, total, acc = attend_keys(
            rows, softmax, cache, scoring, begin, middle, stop, first_key, stop,
            NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS * VALUE_DIM, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N,
            HAS_WINDOW, HAS_SOFTCAP, slopes is not None, not HAS_WINDOW,
        )  # fmt: skip
    else:
        maximum, total, acc = _attend_in_parts(
            rows, softmax, cache, scoring, begin, first_key, stop,
            NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS * VALUE_DIM, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N, SPLIT_LEN,
            HAS_WINDOW, HAS_SOFTCAP, slopes is not None,
        )  # fmt: skip
    indices = packed * (NUM_KV_HEADS * GROUP) + heads
    store_result(out, indices, is_row, total, acc, value_scale, VALUE_DIM, BLOCK_DV)
