"""Triton kernels that read all logits, with a program for a few blocks of a row.

Floats are compared by *keys*: integers with the same order, derived from their bits. A bound of keys can be found bit
    by
bit.
"""

# Pyright checks the functions that Triton compiles as if Python ran them.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

_LEAST_KEY = tl.constexpr(-(1 << 31))
# exp of less than this vanishes when it is added to a weight of one.
_SMALLEST_EXPONENT = tl.constexpr(-87.0)
# State of a row: two counts and a flag.
STATES = tl.constexpr(3)
NUM_CANDIDATES = tl.constexpr(0)
NUM_POSITIVE = tl.constexpr(1)
IS_SEARCHED = tl.constexpr(2)
# Indices of a row's parameters, in the order of ``draws.DTYPES``.
TEMPERATURE = tl.constexpr(0)
TOP_K = tl.constexpr(1)
TOP_P = tl.constexpr(2)
MIN_P = tl.constexpr(3)
UNIFORM = tl.constexpr(4)


@triton.jit
def to_key(value):
    """Return an int32 for each float32, in the same order; NaN is the largest, and both zeros are equal."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def to_value(key):
    """Return the float32 of a key; inverse of ``to_key``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def to_weight(value, scale):
    """Return probabilities relative to the row's largest, by the result of ``load_scale``; 0 for a row with NaN."""
    largest, temperature, min_p = scale
    scaled = (value - largest) / temperature
    weight = tl.where(scaled > _SMALLEST_EXPONENT, tl.exp(scaled), 0.0)
    return tl.where(weight >= min_p, weight, 0.0)


@triton.jit
def load_param(settings, index: tl.constexpr, row, num_rows):
    """Return a parameter of a row, float64."""
    return tl.load(settings + index * num_rows + row)


@triton.jit
def load_scale(settings, bounds, temperature, row, num_rows):
    """Return how logits of a row become weights: its largest logit, its temperature, and the smallest weight."""
    min_p = load_param(settings, MIN_P, row, num_rows).to(tl.float32)
    return to_value(tl.load(bounds + row * 2)), temperature, min_p


@triton.jit
def with_threshold(scale, weight):
    """Return ``scale`` that also drops weights below ``weight``."""
    largest, temperature, min_p = scale
    return largest, temperature, tl.maximum(weight.to(tl.float32), min_p)


@triton.jit
def load_logits(logits, stride, row, ids, vocab_size):
    """Return the logits of tokens ``ids`` of a row in float32, minus infinity after the vocabulary."""
    pointers = logits + row.to(tl.int64) * stride + ids
    return tl.load(pointers, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def block_maxima_kernel(
    logits, stride, maxima, vocab_size, BLOCK: tl.constexpr, GROUP: tl.constexpr, MAX_BLOCKS: tl.constexpr
):  # fmt: skip
    """Store the largest key of each of GROUP blocks, and the first token with this key."""
    row, group = tl.program_id(0), tl.program_id(1)
    block = group * GROUP + tl.arange(0, GROUP)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    keys = to_key(load_logits(logits, stride, row, ids, vocab_size))
    keys = tl.where(ids < vocab_size, keys, _LEAST_KEY)
    largest = tl.max(keys, 1)
    first = tl.min(tl.where(keys == largest[:, None], ids, vocab_size), 1)
    target = maxima + row.to(tl.int64) * 2 * MAX_BLOCKS + block
    tl.store(target, largest)
    tl.store(target + MAX_BLOCKS, first)


@triton.jit
def row_bounds_kernel(
    maxima, bounds, tokens, num_blocks, vocab_size, MAX_BLOCKS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Store a row's most probable token, its largest key, and the largest key that WIDTH blocks reach."""
    row = tl.program_id(0)
    block = tl.arange(0, MAX_BLOCKS)
    pointers = maxima + row.to(tl.int64) * 2 * MAX_BLOCKS + block
    keys = tl.load(pointers, mask=block < num_blocks, other=_LEAST_KEY)
    firsts = tl.load(pointers + MAX_BLOCKS, mask=block < num_blocks, other=vocab_size)
    largest = tl.max(keys, 0)
    tl.store(tokens + row, tl.min(tl.where(keys == largest, firsts, vocab_size - 1), 0).to(tl.int64))
    least = tl.full([], 0, tl.int64)  # counted from the least key
    for step in range(32):
        trial = least + (tl.full([], 1, tl.int64) << (31 - step))
        num_reaching = tl.sum((keys.to(tl.int64) - _LEAST_KEY >= trial).to(tl.int32), 0)
        least = tl.where(num_reaching >= WIDTH, trial, least)
    tl.store(bounds + row * 2, largest)
    tl.store(bounds + row * 2 + 1, (least + _LEAST_KEY).to(tl.int32))


@triton.jit(do_not_specialize=["num_rows"])
def block_weights_kernel(
    logits, stride, settings, bounds, sums, candidates, state, num_rows, vocab_size,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, MAX_BLOCKS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Store the sums of the weights of GROUP blocks, and keys and ids of their tokens that reach the row's bound.

    Also count these candidates of a row, and its tokens with a positive weight. Programs append candidates in arbitrary
    order, on which the result of ``draw_kernel`` does not depend.
    """
    row, group = tl.program_id(0), tl.program_id(1)
    temperature = load_param(settings, TEMPERATURE, row, num_rows).to(tl.float32)
    if temperature > 0.0:
        scale = load_scale(settings, bounds, temperature, row, num_rows)
        least = tl.load(bounds + row * 2 + 1)
        ids = group * GROUP * BLOCK + tl.arange(0, GROUP * BLOCK)
        values = load_logits(logits, stride, row, ids, vocab_size)
        weights = to_weight(values, scale)
        weights = tl.where(ids < vocab_size, weights, 0.0)
        block = group * GROUP + tl.arange(0, GROUP)
        block_sums = tl.sum(tl.reshape(weights, (GROUP, BLOCK)), 1)
        tl.store(sums + row.to(tl.int64) * MAX_BLOCKS + block, block_sums)
        keys = to_key(values)
        is_candidate = (weights > 0.0) & (keys >= least)
        ones = is_candidate.to(tl.int32)
        num_candidates = tl.sum(ones, 0)
        num_positive = tl.sum((weights > 0.0).to(tl.int32), 0)
        if num_positive > 0:
            tl.atomic_add(state + row * STATES + NUM_POSITIVE, num_positive, sem="relaxed")
            begin = tl.atomic_add(state + row * STATES + NUM_CANDIDATES, num_candidates, sem="relaxed")
            index = begin + tl.cumsum(ones, 0) - 1
            is_stored = is_candidate & (index < CAPACITY)
            target = candidates + row.to(tl.int64) * 2 * CAPACITY + index
            tl.store(target, keys, mask=is_stored)
            tl.store(target + CAPACITY, ids, mask=is_stored)
