"""Triton: passes over all logits, a program for some blocks of a row.

Floats are compared by *keys*, their bits made integers of the same order: of those a bound can be found bit by bit.
"""

# What Triton compiles is typed as if Python ran it.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

_LEAST_KEY = tl.constexpr(-(1 << 31))
# Of e to less than this nothing remains beside a weight of one.
_SMALLEST_EXPONENT = tl.constexpr(-87.0)
# What is counted and noted of a row.
STATES = tl.constexpr(3)
NUM_CANDIDATES = tl.constexpr(0)
NUM_POSITIVE = tl.constexpr(1)
IS_SEARCHED = tl.constexpr(2)
# Where a row's parameters are among those of all rows.
TEMPERATURE = tl.constexpr(0)
TOP_K = tl.constexpr(1)
TOP_P = tl.constexpr(2)
MIN_P = tl.constexpr(3)
UNIFORM = tl.constexpr(4)


@triton.jit
def to_key(value):
    """Of float32 an int32 of the same order; NaN is the greatest, and both zeros are the same."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def to_value(key):
    """What ``to_key`` made a key of."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def to_weight(value, largest, temperature, min_p):
    """Probability relative to the row's largest; 0 below ``min_p`` and where a row makes no sense."""
    scaled = (value - largest) / temperature
    weight = tl.where(scaled > _SMALLEST_EXPONENT, tl.exp(scaled), 0.0)
    return tl.where(weight >= min_p, weight, 0.0)


@triton.jit
def load_param(settings, which: tl.constexpr, row, num_rows):
    """A parameter of a row, float64."""
    return tl.load(settings + which * num_rows + row)


@triton.jit
def load_logits(logits, stride, row, at, vocab_size):
    """Some logits of a row in float32, minus infinity behind the last."""
    return tl.load(logits + row.to(tl.int64) * stride + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def block_maxima_kernel(
    logits, stride, maxima, vocab_size, BLOCK: tl.constexpr, GROUP: tl.constexpr, MAX_BLOCKS: tl.constexpr
):  # fmt: skip
    """Store the largest key of each of GROUP blocks, and the first token that has it."""
    row, group = tl.program_id(0), tl.program_id(1)
    block = group * GROUP + tl.arange(0, GROUP)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    keys = to_key(load_logits(logits, stride, row, at, vocab_size))
    keys = tl.where(at < vocab_size, keys, _LEAST_KEY)
    largest = tl.max(keys, 1)
    first = tl.min(tl.where(keys == largest[:, None], at, vocab_size), 1)
    place = maxima + row.to(tl.int64) * 2 * MAX_BLOCKS + block
    tl.store(place, largest)
    tl.store(place + MAX_BLOCKS, first)


@triton.jit
def row_bounds_kernel(
    maxima, bounds, tokens, num_blocks, vocab_size, MAX_BLOCKS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Store a row's most probable token, its largest key, and the largest key that WIDTH blocks reach."""
    row = tl.program_id(0)
    block = tl.arange(0, MAX_BLOCKS)
    place = maxima + row.to(tl.int64) * 2 * MAX_BLOCKS + block
    keys = tl.load(place, mask=block < num_blocks, other=_LEAST_KEY)
    firsts = tl.load(place + MAX_BLOCKS, mask=block < num_blocks, other=vocab_size)
    largest = tl.max(keys, 0)
    tl.store(tokens + row, tl.min(tl.where(keys == largest, firsts, vocab_size - 1), 0).to(tl.int64))
    least = tl.full([], 0, tl.int64)  # counted from the least key
    for step in range(32):
        trial = least + (tl.full([], 1, tl.int64) << (31 - step))
        reach = tl.sum((keys.to(tl.int64) - _LEAST_KEY >= trial).to(tl.int32), 0)
        least = tl.where(reach >= WIDTH, trial, least)
    tl.store(bounds + row * 2, largest)
    tl.store(bounds + row * 2 + 1, (least + _LEAST_KEY).to(tl.int32))


@triton.jit(do_not_specialize=["num_rows"])
def block_weights_kernel(
    logits, stride, settings, bounds, sums, candidates, state, num_rows, vocab_size,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, MAX_BLOCKS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Store the sums of the weights of GROUP blocks, and keys and ids of their tokens that reach the row's bound.

    How many of a row do, and how many weigh anything at all, is counted.

    In which order programs put their candidates is left to chance; ``draw_kernel`` gives the same for any.
    """
    row, group = tl.program_id(0), tl.program_id(1)
    temperature = load_param(settings, TEMPERATURE, row, num_rows).to(tl.float32)
    if temperature > 0.0:
        min_p = load_param(settings, MIN_P, row, num_rows).to(tl.float32)
        largest = to_value(tl.load(bounds + row * 2))
        least = tl.load(bounds + row * 2 + 1)
        at = group * GROUP * BLOCK + tl.arange(0, GROUP * BLOCK)
        values = load_logits(logits, stride, row, at, vocab_size)
        weights = to_weight(values, largest, temperature, min_p)
        weights = tl.where(at < vocab_size, weights, 0.0)
        block = group * GROUP + tl.arange(0, GROUP)
        block_sums = tl.sum(tl.reshape(weights, (GROUP, BLOCK)), 1)
        tl.store(sums + row.to(tl.int64) * MAX_BLOCKS + block, block_sums)
        keys = to_key(values)
        is_candidate = (weights > 0.0) & (keys >= least)
        counted = is_candidate.to(tl.int32)
        num_found = tl.sum(counted, 0)
        num_positive = tl.sum((weights > 0.0).to(tl.int32), 0)
        if num_positive > 0:
            tl.atomic_add(state + row * STATES + NUM_POSITIVE, num_positive, sem="relaxed")
            begin = tl.atomic_add(state + row * STATES + NUM_CANDIDATES, num_found, sem="relaxed")
            place = begin + tl.cumsum(counted, 0) - 1
            is_stored = is_candidate & (place < CAPACITY)
            to = candidates + row.to(tl.int64) * 2 * CAPACITY + place
            tl.store(to, keys, mask=is_stored)
            tl.store(to + CAPACITY, at, mask=is_stored)
