"""Triton kernel that draws a row's token from its candidates, or from the vocabulary by the sums of its blocks."""

# Pyright checks the functions that Triton compiles as if Python ran them.
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_blocks import (
    IS_SEARCHED,
    NUM_CANDIDATES,
    NUM_POSITIVE,
    STATES,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNIFORM,
    load_logits,
    load_param,
    load_scale,
    to_value,
    to_weight,
)

# Weights of candidates are rounded down to multiples of 1 / _STEPS. A sum of up to 512 of them is exact in float64, so
# it does not depend on the order of the candidates. A token loses 6e-14 of the largest weight, less than float32 logits
# resolve.
_STEPS = tl.constexpr(float(1 << 44))
# Keeps a draw below the total when rounding would reach it.
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-52)
_TILE = tl.constexpr(16)


@triton.jit
def _exact(weight):
    return tl.floor(weight.to(tl.float64) * _STEPS) / _STEPS


@triton.jit(do_not_specialize=["num_rows"])
def draw_kernel(
    logits, stride, settings, bounds, sums, candidates, state, tokens, num_rows, vocab_size,
    BLOCK: tl.constexpr, MAX_BLOCKS: tl.constexpr, CAPACITY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Draw a row's token, or mark the row to be searched. A row without weight keeps its most probable token."""
    row = tl.program_id(0)
    temperature = load_param(settings, TEMPERATURE, row, num_rows).to(tl.float32)
    if temperature > 0.0:
        top_k = load_param(settings, TOP_K, row, num_rows).to(tl.int64)
        top_p = load_param(settings, TOP_P, row, num_rows)
        uniform = load_param(settings, UNIFORM, row, num_rows)
        scale = load_scale(settings, bounds, temperature, row, num_rows)
        has_limit = (top_k > 0) & (top_k < vocab_size)
        token = tl.full([], -1, tl.int32)
        if has_limit | (top_p < 1.0):
            num_candidates = tl.load(state + row * STATES + NUM_CANDIDATES)
            has_more = num_candidates < tl.load(state + row * STATES + NUM_POSITIVE)
            needs_search = num_candidates > CAPACITY
            if num_candidates <= CAPACITY:
                limit = tl.where(has_limit, top_k, vocab_size).to(tl.int32)
                width = tl.where(has_limit, num_candidates, tl.minimum(num_candidates, WIDTH))
                total = tl.sum(_block_sums(sums, row, vocab_size, BLOCK, MAX_BLOCKS), 0)
                token, needs_search = _draw_from_candidates(
                    candidates + row.to(tl.int64) * 2 * CAPACITY, num_candidates, has_more, limit, width, has_limit,
                    total, scale, top_p, uniform, CAPACITY,
                )  # fmt: skip
            tl.store(state + row * STATES + IS_SEARCHED, needs_search.to(tl.int32))
        else:
            blocks = _block_sums(sums, row, vocab_size, BLOCK, MAX_BLOCKS)
            token = _draw_in_order(logits, stride, row, blocks, vocab_size, scale, uniform, BLOCK, MAX_BLOCKS)
        if token >= 0:
            tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _block_sums(sums, row, vocab_size, BLOCK: tl.constexpr, MAX_BLOCKS: tl.constexpr):
    block = tl.arange(0, MAX_BLOCKS)
    row_sums = tl.load(sums + row.to(tl.int64) * MAX_BLOCKS + block, mask=block * BLOCK < vocab_size, other=0.0)
    return row_sums.to(tl.float64)


@triton.jit
def _draw_from_candidates(
    candidates, num_candidates, has_more, limit, width, has_limit, total, scale, top_p, uniform,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    """Return the token drawn, and whether the row must be searched because its prefix does not end within ``width``.

    ``has_more`` is True if tokens other than the candidates have a positive weight; with a restrictive grammar none
    has. Each candidate is compared with all others. The candidates before it, in descending order and the first of
    equal ones first, give its rank and the sum before it without a sort.
    """
    index = tl.arange(0, CAPACITY)
    is_candidate = index < num_candidates
    keys = tl.load(candidates + index, mask=is_candidate, other=0)
    ids = tl.load(candidates + CAPACITY + index, mask=is_candidate, other=0)
    weights = _exact(tl.where(is_candidate, to_weight(to_value(keys), scale), 0.0))
    ranks = tl.zeros((CAPACITY,), tl.int32)
    before = tl.zeros((CAPACITY,), tl.float64)
    for start in range(0, num_candidates, _TILE):
        other = start + tl.arange(0, _TILE)
        is_other = other < num_candidates
        other_keys = tl.load(candidates + other, mask=is_other, other=0)
        other_ids = tl.load(candidates + CAPACITY + other, mask=is_other, other=0)
        other_weights = _exact(to_weight(to_value(other_keys), scale))
        is_tied = other_keys[None, :] == keys[:, None]
        is_ahead = (other_keys[None, :] > keys[:, None]) | (is_tied & (other_ids[None, :] < ids[:, None]))
        is_ahead = is_ahead & is_other[None, :]
        ranks += tl.sum(is_ahead.to(tl.int32), 1)
        before += tl.sum(tl.where(is_ahead, other_weights[None, :], 0.0), 1)
    # Filters set weights to 0. Kept tokens are a prefix, so the sums before them only contain kept tokens.
    is_kept = is_candidate & (ranks < tl.minimum(limit, width)) & (weights > 0.0)
    reach = tl.max(tl.where(is_kept, before + weights, 0.0), 0)
    has_more = has_more | (num_candidates > width)
    continues = has_more & (limit > width) & (tl.sum(is_kept.to(tl.int32), 0) == width)
    nucleus = tl.where(continues, total, reach) * top_p
    is_kept = is_kept & ((before < nucleus) | (ranks == 0))
    prefix = tl.max(tl.where(is_kept, before + weights, 0.0), 0)
    target = tl.minimum(uniform * prefix, prefix * _BELOW_ONE)
    rank = tl.max(tl.where(is_kept & (before <= target), ranks, -1), 0)
    token = tl.max(tl.where(is_candidate & (ranks == rank), ids, -1), 0)
    # If top_k continues after the candidates, the total that top_p refers to is not known either.
    return token, continues & (has_limit | (reach < nucleus))


@triton.jit
def _draw_in_order(
    logits, stride, row, blocks, vocab_size, scale, uniform,
    BLOCK: tl.constexpr, MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Draw by inverse CDF in the order of the vocabulary: first a block, then a token of it."""
    number = tl.arange(0, MAX_BLOCKS)
    cumulative = tl.cumsum(blocks, 0)
    total = tl.max(cumulative, 0)
    target = tl.minimum(uniform * total, total * _BELOW_ONE)
    block = tl.min(tl.where((cumulative > target) & (blocks > 0.0), number, MAX_BLOCKS), 0)
    before = tl.max(tl.where(number < block, cumulative, 0.0), 0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    weights = to_weight(load_logits(logits, stride, row, ids, vocab_size), scale)
    weights = tl.where(ids < vocab_size, weights, 0.0).to(tl.float64)
    inner = before + tl.cumsum(weights, 0)
    first = tl.min(tl.where((inner > target) & (weights > 0.0), ids, vocab_size), 0)
    # The sums of blocks are float32, so the target may slightly exceed the sum of the block's tokens.
    last = tl.max(tl.where(weights > 0.0, ids, -1), 0)
    return tl.minimum(first, last)
