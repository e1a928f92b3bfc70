"""Triton kernel for rows that need more tokens than their candidates. It searches the bits of a key.

``S(k)``, the number or the weight of the tokens with keys of at least ``k``, decreases in ``k``. The largest key whose
``S`` reaches a goal is found 4 bits per pass over all logits: the k-th token of ``top_k``, the last token of ``top_p``,
and, for rows that draw in descending order, the token drawn. Tokens with equal keys are in the order of the vocabulary.
"""

# Pyright checks the functions that Triton compiles as if Python ran them.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_blocks import (
    IS_SEARCHED,
    STATES,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNIFORM,
    load_param,
    load_scale,
    to_key,
    to_value,
    to_weight,
    with_threshold,
)

_LEAST_KEY = tl.constexpr(-(1 << 31))
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-52)
_DIGITS = tl.constexpr(16)


@triton.jit(do_not_specialize=["num_rows"])
def search_kernel(
    logits, stride, settings, bounds, state, tokens, num_rows, vocab_size, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Draw the token of a row that ``draw_kernel`` has marked."""
    row = tl.program_id(0)
    if tl.load(state + row * STATES + IS_SEARCHED) != 0:
        temperature = load_param(settings, TEMPERATURE, row, num_rows).to(tl.float32)
        top_k = load_param(settings, TOP_K, row, num_rows)
        top_p = load_param(settings, TOP_P, row, num_rows)
        uniform = load_param(settings, UNIFORM, row, num_rows)
        scale = load_scale(settings, bounds, temperature, row, num_rows)
        row_logits = logits + row.to(tl.int64) * stride
        floor = tl.full([], _LEAST_KEY, tl.int32)
        extra = tl.full([], 0.0, tl.float64)
        num_tied = tl.full([], 0, tl.int32)
        has_limit = (top_k > 0) & (top_k < vocab_size)
        if has_limit:
            floor = _search(row_logits, vocab_size, floor, extra, top_k, scale, False, True, BLOCK)
            # Of the tokens that tie with the last one of top_k, only the first ones are kept.
            _, num_above = _sum_above(row_logits, vocab_size, floor, scale, BLOCK)
            num_tied = top_k.to(tl.int32) - num_above
            extra = num_tied.to(tl.float64) * to_weight(to_value(floor), scale).to(tl.float64)
        total, _ = _sum_above(row_logits, vocab_size, floor, scale, BLOCK)
        nucleus = (total + extra) * top_p
        last = _search(row_logits, vocab_size, floor, extra, nucleus, scale, False, False, BLOCK)
        last = tl.maximum(tl.minimum(last, to_key(scale[0])), floor)
        before, num_before, num_last, weight = _tied_tokens(row_logits, vocab_size, last, floor, num_tied, scale, BLOCK)
        num_last = _tokens_within(nucleus - before, weight, num_last)
        if has_limit | (num_before + num_last <= WIDTH):
            token = _draw_in_descent(
                row_logits, vocab_size, floor, extra, num_tied, last, before + num_last.to(tl.float64) * weight,
                num_last, scale, uniform, BLOCK,
            )  # fmt: skip
        else:
            token = _draw_in_order(row_logits, vocab_size, with_threshold(scale, weight), uniform, BLOCK)
        if token >= 0:
            tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _search(
    row_logits, vocab_size, floor, extra, goal, scale,
    IS_STRICT: tl.constexpr, IS_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the largest key whose ``S``, a weight or a count, reaches ``goal``, or exceeds it if ``IS_STRICT``.

    ``S`` covers tokens above ``floor``; for keys up to ``floor`` it also includes the weight ``extra``.
    """
    result = tl.full([], 0, tl.int64)  # counted from the least key
    digit = tl.arange(0, _DIGITS)
    for step in range(8):
        trials = result + (digit.to(tl.int64) << (28 - 4 * step))
        trial_keys = (trials + _LEAST_KEY).to(tl.int32)
        reach = tl.where(trial_keys <= floor, extra, 0.0) + tl.zeros((_DIGITS,), tl.float64)
        for start in range(0, vocab_size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            values = _load(row_logits, at, vocab_size)
            keys = to_key(values)
            ones = tl.full((BLOCK,), 1.0, tl.float32)
            weights = ones if IS_COUNT else to_weight(values, scale)
            weights = tl.where((at < vocab_size) & (keys > floor), weights, 0.0)
            reach += tl.sum(tl.where(keys[:, None] >= trial_keys[None, :], weights[:, None], 0.0), 0).to(tl.float64)
        does_reach = (reach > goal) if IS_STRICT else (reach >= goal)
        last = tl.max(tl.where(does_reach, digit, 0), 0)
        result += last.to(tl.int64) << (28 - 4 * step)
    return (result + _LEAST_KEY).to(tl.int32)


@triton.jit
def _load(row_logits, at, vocab_size):
    return tl.load(row_logits + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _sum_above(row_logits, vocab_size, key, scale, BLOCK: tl.constexpr):
    """Return the weight of the tokens above ``key``, float64, and their number."""
    total = tl.full([], 0.0, tl.float64)
    count = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = _load(row_logits, at, vocab_size)
        is_above = (at < vocab_size) & (to_key(values) > key)
        weights = to_weight(values, scale)
        total += tl.sum(tl.where(is_above, weights, 0.0), 0).to(tl.float64)
        count += tl.sum(is_above.to(tl.int32), 0)
    return total, count


@triton.jit
def _count_equal(row_logits, vocab_size, key, BLOCK: tl.constexpr):
    count = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_equal = (at < vocab_size) & (to_key(_load(row_logits, at, vocab_size)) == key)
        count += tl.sum(is_equal.to(tl.int32), 0)
    return count


@triton.jit
def _draw_in_descent(
    row_logits, vocab_size, floor, extra, num_tied, last, prefix, num_last,
    scale, uniform, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw in descending order from a prefix of weight ``prefix`` that ends with ``num_last`` tokens of key ``last``.

    Return -1 if the weight is 0.
    """
    target = tl.minimum(uniform * prefix, prefix * _BELOW_ONE)
    drawn = _search(row_logits, vocab_size, floor, extra, target, scale, True, False, BLOCK)
    drawn = tl.maximum(tl.minimum(drawn, to_key(scale[0])), last)
    before, _, num_drawn, weight = _tied_tokens(
        row_logits, vocab_size, drawn, floor, num_tied, scale, BLOCK
    )  # fmt: skip
    num_drawn = tl.where(drawn == last, num_last, num_drawn)
    index = tl.floor((target - before) / tl.where(weight > 0.0, weight, 1.0))
    index = tl.minimum(tl.maximum(index, 0.0), (num_drawn - 1).to(tl.float64)).to(tl.int32)
    token = _find_equal(row_logits, vocab_size, drawn, index, BLOCK)
    return tl.where(prefix > 0.0, token, -1)


@triton.jit
def _tied_tokens(row_logits, vocab_size, key, floor, num_tied, scale, BLOCK: tl.constexpr):
    """Return weight and number of the tokens above ``key``, and number and weight of each kept token with ``key``."""
    before, num_before = _sum_above(row_logits, vocab_size, key, scale, BLOCK)
    count = _count_equal(row_logits, vocab_size, key, BLOCK)
    weight = to_weight(to_value(key), scale).to(tl.float64)
    return before, num_before, tl.where((key == floor) & (num_tied > 0), num_tied, count), weight


@triton.jit
def _tokens_within(rest, weight, num_tokens):
    """Return the number of ``num_tokens`` equal tokens that reach the weight ``rest``, at least one."""
    needed = tl.ceil(rest / tl.where(weight > 0.0, weight, 1.0))
    return tl.minimum(tl.maximum(needed, 1.0), num_tokens.to(tl.float64)).to(tl.int32)


@triton.jit
def _find_equal(row_logits, vocab_size, key, index, BLOCK: tl.constexpr):
    """Return token number ``index`` of the tokens with ``key``."""
    token = tl.full([], -1, tl.int32)
    num_before = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_equal = (at < vocab_size) & (to_key(_load(row_logits, at, vocab_size)) == key)
        ones = is_equal.to(tl.int32)
        number = num_before + tl.cumsum(ones, 0) - 1
        token = tl.maximum(token, tl.max(tl.where(is_equal & (number == index), at, -1), 0))
        num_before += tl.sum(ones, 0)
    return token


@triton.jit
def _draw_in_order(row_logits, vocab_size, scale, uniform, BLOCK: tl.constexpr):
    """Draw from the tokens with a weight, in the order of the vocabulary; return -1 without any."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        total += _block_sum(row_logits, start, vocab_size, scale, BLOCK)
    target = tl.minimum(uniform * total, total * _BELOW_ONE)
    sum_before = tl.full([], 0.0, tl.float64)
    begin = tl.full([], -1, tl.int32)
    begin_sum = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        sum_after = sum_before + _block_sum(row_logits, start, vocab_size, scale, BLOCK)
        is_here = (begin < 0) & (sum_after > target)
        begin = tl.where(is_here, start, begin)
        begin_sum = tl.where(is_here, sum_before, begin_sum)
        sum_before = sum_after
    at = tl.maximum(begin, 0) + tl.arange(0, BLOCK)
    weights = to_weight(_load(row_logits, at, vocab_size), scale)
    weights = tl.where((at < vocab_size) & (begin >= 0), weights, 0.0).to(tl.float64)
    inner = begin_sum + tl.cumsum(weights, 0)
    first = tl.min(tl.where((inner > target) & (weights > 0.0), at, vocab_size), 0)
    return tl.minimum(first, tl.max(tl.where(weights > 0.0, at, -1), 0))


@triton.jit
def _block_sum(row_logits, start, vocab_size, scale, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    weights = to_weight(_load(row_logits, at, vocab_size), scale)
    return tl.sum(tl.where(at < vocab_size, weights, 0.0), 0).to(tl.float64)
