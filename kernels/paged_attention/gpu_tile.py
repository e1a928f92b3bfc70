"""Functions of the attention kernels for one tile of queries: its rows, and a running softmax over keys.

A tile has ``BLOCK_M`` rows: ``BLOCK_M // HEADS`` query tokens of one request, each with ``HEADS`` query heads that read
the same key/value head, so that loaded keys and values serve all of them. Scores are in units of log2, because the
hardware has exp2. The running maximum starts at a finite number, so that a row that sees no key subtracts no
infinities. Tiles of keys begin at multiples of ``BLOCK_N``. A tile in which a row sees no key does not change the bits
of the row: its maximum stays, so its sums are multiplied by 1 and 0 is added.

Source: Dao 2023 (arXiv:2307.08691), section 3.1; Ainslie et al. 2023 (arXiv:2305.13245) for the groups of heads.
"""

# Pyright takes a kernel's constants and loops for objects of Triton.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from ..kv_cache.cache_slots import SCALED_DIMS

# The interpreter stores bfloat16 as bit patterns, which its dot would multiply as integers.
_IS_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
_LOG2E = tl.constexpr(1.4426950408889634)
_EMPTY_MAXIMUM = tl.constexpr(-1.0e38)
_SCALED_DIMS = tl.constexpr(SCALED_DIMS)


@triton.jit
def _dot(left, right, acc):
    """Return ``acc`` plus the product, in float32; float32 operands are not rounded to TF32."""
    if _IS_INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def first_visible(position, window, HAS_WINDOW: tl.constexpr):
    """Return the first key that the token at ``position`` sees."""
    first = position * 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0)
    return first


@triton.jit
def split_keys(first_key, stop, num_splits, BLOCK_N: tl.constexpr, SPLIT_LEN: tl.constexpr):
    """Split a row's keys ``first_key .. stop``; return the start of the first split, their length and their number.

    With a ``SPLIT_LEN`` splits begin at its multiples for every row; else the row's tiles are distributed evenly.
    """
    if SPLIT_LEN > 0:
        start = first_key // SPLIT_LEN * SPLIT_LEN
        length = start * 0 + SPLIT_LEN
    else:
        start = first_key // BLOCK_N * BLOCK_N
        num_tiles = tl.cdiv(stop - start, BLOCK_N)
        length = tl.maximum(tl.cdiv(num_tiles, num_splits), 1) * BLOCK_N
    return start, length, tl.cdiv(stop - start, length)


@triton.jit
def tile_rows(first_token, num_tokens, head_block, BLOCK_M: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr):
    """Return for each row its token in the request, its head in the group, and whether both exist; each ``[M]``."""
    rows = tl.arange(0, BLOCK_M)
    tokens = first_token + rows // HEADS
    heads = head_block * HEADS + rows % HEADS
    return tokens, heads, (rows < BLOCK_M // HEADS * HEADS) & (tokens < num_tokens) & (heads < GROUP)


@triton.jit
def load_query(start, heads, is_row, head_stride, dim_stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the rows' queries ``[M, BLOCK_D]``; ``start`` points to the token's heads, one pointer or ``[M, 1]``."""
    dims = tl.arange(0, BLOCK_D)
    return tl.load(
        start + heads[:, None] * head_stride + dims[None, :] * dim_stride,
        mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )


@triton.jit
def load_slopes(slopes, heads, is_row, BLOCK_M: tl.constexpr):
    """Return the ALiBi slopes of the rows' heads ``[M]``, in units of log2; 0 for a model without."""
    row_slopes = tl.zeros([BLOCK_M], tl.float32)
    if slopes is not None:
        row_slopes = tl.load(slopes + heads, mask=is_row, other=0.0).to(tl.float32) * _LOG2E
    return row_slopes


@triton.jit
def empty_softmax_state(BLOCK_M: tl.constexpr):
    """Return maximum and total ``[M]`` of a softmax over no keys."""
    return tl.full([BLOCK_M], _EMPTY_MAXIMUM, tl.float32), tl.zeros([BLOCK_M], tl.float32)


@triton.jit
def initial_softmax_state(sinks, heads, is_row, BLOCK_M: tl.constexpr):
    """Return maximum and total ``[M]`` of rows before their first key; a sink counts as a key before all others."""
    maximum, total = empty_softmax_state(BLOCK_M)
    if sinks is not None:
        logits = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32)
        maximum = tl.where(is_row, logits * _LOG2E, maximum)
        total = tl.where(is_row, total + 1.0, total)
    return maximum, total


@triton.jit
def fold(maximum, total, acc, part_maximum, part_total, part_acc):
    """Combine two running softmaxes of the same rows over different keys."""
    new_maximum = tl.maximum(maximum, part_maximum)
    rescale = tl.exp2(maximum - new_maximum)
    part_rescale = tl.exp2(part_maximum - new_maximum)
    total = total * rescale + part_total * part_rescale
    acc = acc * rescale[:, None] + part_acc * part_rescale[:, None]
    return new_maximum, total, acc


@triton.jit
def weighted_mean(total, acc, value_scale):
    """Return the rows' results ``[M, DV]``; zeros for a row that sees no key."""
    return acc / tl.where(total > 0.0, total, 1.0)[:, None] * value_scale


@triton.jit
def store_result(
    out, indices, is_row, total, acc, value_scale, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr
):  # fmt: skip
    """Write the rows' results into ``out`` ``[T, H, DV]``; ``indices`` ``[M]`` are ``token * H + head``."""
    dims = tl.arange(0, BLOCK_DV)
    tl.store(
        out + indices[:, None] * VALUE_DIM + dims[None, :],
        weighted_mean(total, acc, value_scale).to(out.dtype.element_ty),
        mask=is_row[:, None] & (dims < VALUE_DIM)[None, :],
    )


@triton.jit
def attend_keys(
    rows, softmax, cache, scoring, begin, middle, end, first_key, stop,
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_UNMASKED: tl.constexpr,
):  # fmt: skip
    """Fold tiles of keys ``begin .. end`` into the running softmax of the rows, and return it.

    ``begin`` and ``middle`` are multiples of ``BLOCK_N``; only keys ``first_key .. stop`` are read.

    Args:
        rows: ``(query [M, BLOCK_D], positions [M], slopes [M])``; a row at position -1 sees no key.
        softmax: ``(maximum [M], total [M], acc [M, BLOCK_DV])``.
        cache: ``(keys of the head, its values, the row's block table, scales of the keys, scales of the values)``;
            the scales are None unless the cache is in int8.
        scoring: ``(window, factor on the products, soft cap in units of log2)``.
        HAS_UNMASKED: every row sees every key before ``middle``, so these need no mask. Else ``middle`` is ``begin``,
            and there is one loop over all keys.
    """
    query, positions, slopes = rows
    maximum, total, acc = softmax
    keys_of_head, values_of_head, table, key_scales, value_scales = cache
    num_kv_heads: tl.constexpr = KEY_STRIDE // HEAD_DIM
    window, score_scale, cap = scoring
    for phase in tl.static_range(0 if HAS_UNMASKED else 1, 2):
        loop_begin = begin if phase == 0 else middle
        loop_end = middle if phase == 0 else end
        blocks = _load_blocks(table, loop_begin, first_key, stop, BLOCK_SIZE, BLOCK_N)
        for start in tl.range(loop_begin, loop_end, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            is_read = (keys >= first_key) & (keys < stop)
            slots = (blocks * BLOCK_SIZE + keys % BLOCK_SIZE)[:, None]
            key_tile = _load_tile(keys_of_head + slots * KEY_STRIDE, is_read, HEAD_DIM, query.shape[1])
            value_tile = _load_tile(values_of_head + slots * VALUE_STRIDE, is_read, VALUE_DIM, acc.shape[1])
            if key_scales is not None:
                key_tile = _scale_tile(key_tile, key_scales, slots * num_kv_heads, is_read, HEAD_DIM)
                value_tile = _scale_tile(value_tile, value_scales, slots * num_kv_heads, is_read, VALUE_DIM)
            # Loaded one tile ahead, because the compiler pipelines loads badly if their addresses are loaded in the
            # same iteration.
            blocks = _load_blocks(table, start + BLOCK_N, first_key, stop, BLOCK_SIZE, BLOCK_N)
            no_scores = tl.zeros([query.shape[0], BLOCK_N], tl.float32)
            scores = _dot(query, tl.trans(key_tile.to(query.dtype)), no_scores) * score_scale
            scores = _score(scores, keys, positions, slopes, cap, HAS_SOFTCAP, HAS_SLOPES)
            if phase == 1:
                scores = _mask_scores(scores, keys, positions, window, HAS_WINDOW)
            maximum, total, acc = _fold_scores(maximum, total, acc, scores, value_tile.to(query.dtype))
    return maximum, total, acc


@triton.jit
def _load_tile(starts, is_read, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return keys or values ``[N, BLOCK]`` that begin at ``starts`` ``[N, 1]``; zeros for rows that are not read."""
    dims = tl.arange(0, BLOCK)
    return tl.load(starts + dims[None, :], mask=is_read[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def scales_of_head(scales, kv_head, DIM: tl.constexpr):
    """Return a pointer to the scales of a head, of which ``DIM`` dimensions have ``cdiv(DIM, 32)``; None without."""
    if scales is not None:
        scales += kv_head * ((DIM + _SCALED_DIMS - 1) // _SCALED_DIMS)
    return scales


@triton.jit
def _scale_tile(tile, scales, heads, is_read, DIM: tl.constexpr):
    """Return the numbers ``[N, BLOCK]`` of a tile in bytes, in float32. ``heads`` ``[N, 1]`` are indices of heads."""
    num_scales: tl.constexpr = (DIM + _SCALED_DIMS - 1) // _SCALED_DIMS
    width: tl.constexpr = min(_SCALED_DIMS, tile.shape[1])
    columns = tl.arange(0, tile.shape[1] // width)[None, :]
    mask = is_read[:, None] & (columns < num_scales)
    factors = tl.load(scales + heads * num_scales + columns, mask=mask, other=0.0).to(tl.float32)
    blocks = tl.reshape(tile.to(tl.float32), [tile.shape[0], tile.shape[1] // width, width])
    return tl.reshape(blocks * factors[:, :, None], [tile.shape[0], tile.shape[1]])


@triton.jit
def _mask_scores(scores, keys, positions, window, HAS_WINDOW: tl.constexpr):
    """Return scores ``[M, N]``, minus infinity for keys that the token at a row's position does not see."""
    is_visible = keys[None, :] <= positions[:, None]
    if HAS_WINDOW:
        is_visible = is_visible & (keys[None, :] > positions[:, None] - window)
    return tl.where(is_visible, scores, float("-inf"))


@triton.jit
def _fold_scores(maximum, total, acc, scores, value_tile):
    """Fold a tile of ``scores`` ``[M, N]`` and values ``[N, BLOCK_DV]`` into the running softmax."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - new_maximum[:, None])
    rescale = tl.exp2(maximum - new_maximum)
    total = total * rescale + tl.sum(weights, 1)
    acc = _dot(weights.to(value_tile.dtype), value_tile, acc * rescale[:, None])
    return new_maximum, total, acc


@triton.jit
def _load_blocks(table, start, first_key, stop, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the blocks of keys ``start .. start + BLOCK_N``, int64 since 4 GiB hold 2**31 elements of bfloat16."""
    keys = start + tl.arange(0, BLOCK_N)
    return tl.load(table + keys // BLOCK_SIZE, mask=(keys >= first_key) & (keys < stop), other=0).to(tl.int64)


@triton.jit
def _score(scores, keys, positions, slopes, cap, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr):
    """Return scores in units of log2 ``[M, N]`` from scaled products; with a soft cap, from ``2 * product / cap``."""
    if HAS_SOFTCAP:
        # cap * tanh(scores / 2); the exponent is never positive, so nothing overflows.
        decayed = tl.exp2(-tl.abs(scores))
        scores = tl.where(scores < 0.0, -cap, cap) * ((1.0 - decayed) / (1.0 + decayed))
    if HAS_SLOPES:
        scores += slopes[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
    return scores
