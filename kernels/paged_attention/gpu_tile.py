"""What the attention kernels do with one tile of queries: whose rows they are, and a running softmax over keys.

A tile has ``BLOCK_M`` rows: ``BLOCK_M // HEADS`` query tokens of one request, each with ``HEADS`` query heads that read
the same key/value head, so that what is loaded of the cache serves them all. Scores are in units of log2, because the
hardware has exp2; the running maximum begins at a finite number, so that a row which sees nothing subtracts no
infinities. Tiles of keys begin at multiples of ``BLOCK_N``. One in which a row sees nothing changes no bit of the row:
its maximum stays, so what it has is multiplied by 1 and gets 0 added.

Source: Dao 2023 (arXiv:2307.08691), section 3.1; Ainslie et al. 2023 (arXiv:2305.13245) for the groups of heads.
"""

# To pyright a kernel's constants and loops are objects of Triton.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

# The interpreter holds bfloat16 as bit patterns, and its dot multiplies those as integers.
_IS_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
_LOG2E = tl.constexpr(1.4426950408889634)
_NOTHING_SEEN = tl.constexpr(-1.0e38)


@triton.jit
def _dot(left, right, acc):
    """``acc`` plus the product, in float32; float32 operands are not rounded to TF32."""
    if _IS_INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def first_visible(position, window, HAS_WINDOW: tl.constexpr):
    """The first key that the token at ``position`` sees."""
    first = position * 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0)
    return first


@triton.jit
def split_keys(first_key, stop, num_splits, BLOCK_N: tl.constexpr, SPLIT_LEN: tl.constexpr):
    """Cut a row's keys ``first_key .. stop``; ``(where the first split begins, how long each is, how many)``.

    With a ``SPLIT_LEN`` splits lie at its multiples, whatever the row; else the row's tiles are dealt out evenly.
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
    """Which token of the request and which head of the group each row is; ``([M], [M], [M] whether there is such)``."""
    rows = tl.arange(0, BLOCK_M)
    tokens = first_token + rows // HEADS
    heads = head_block * HEADS + rows % HEADS
    return tokens, heads, (rows < BLOCK_M // HEADS * HEADS) & (tokens < num_tokens) & (heads < GROUP)


@triton.jit
def load_query(start, heads, is_row, head_stride, dim_stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The rows' queries ``[M, BLOCK_D]``; ``start`` points at the token's heads, one pointer or ``[M, 1]``."""
    dims = tl.arange(0, BLOCK_D)
    return tl.load(
        start + heads[:, None] * head_stride + dims[None, :] * dim_stride,
        mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )


@triton.jit
def load_slopes(slopes, heads, is_row, BLOCK_M: tl.constexpr):
    """ALiBi slopes of the rows' heads ``[M]``, in units of log2; 0 where the model has none."""
    row_slopes = tl.zeros([BLOCK_M], tl.float32)
    if slopes is not None:
        row_slopes = tl.load(slopes + heads, mask=is_row, other=0.0).to(tl.float32) * _LOG2E
    return row_slopes


@triton.jit
def nothing_seen(BLOCK_M: tl.constexpr):
    """Maximum and total ``[M]`` of a softmax over no keys."""
    return tl.full([BLOCK_M], _NOTHING_SEEN, tl.float32), tl.zeros([BLOCK_M], tl.float32)


@triton.jit
def before_any_key(sinks, heads, is_row, BLOCK_M: tl.constexpr):
    """Maximum and total ``[M]`` of rows that have seen no key: a sink is a key that was seen before all."""
    maximum, total = nothing_seen(BLOCK_M)
    if sinks is not None:
        logits = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32)
        maximum = tl.where(is_row, logits * _LOG2E, maximum)
        total = tl.where(is_row, total + 1.0, total)
    return maximum, total


@triton.jit
def fold(maximum, total, acc, part_maximum, part_total, part_acc):
    """Join two running softmaxes of the same rows over different keys."""
    joined = tl.maximum(maximum, part_maximum)
    rescale = tl.exp2(maximum - joined)
    part_rescale = tl.exp2(part_maximum - joined)
    total = total * rescale + part_total * part_rescale
    acc = acc * rescale[:, None] + part_acc * part_rescale[:, None]
    return joined, total, acc


@triton.jit
def weighted_mean(total, acc, value_scale):
    """The rows' results ``[M, DV]``; zeros for a row that saw nothing."""
    return acc / tl.where(total > 0.0, total, 1.0)[:, None] * value_scale


@triton.jit
def store_result(
    out, places, is_row, total, acc, value_scale, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr
):  # fmt: skip
    """Write the rows' results into ``out`` ``[T, H, DV]``; ``places`` ``[M]`` is ``token * H + head`` of each."""
    dims = tl.arange(0, BLOCK_DV)
    tl.store(
        out + places[:, None] * VALUE_DIM + dims[None, :],
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
        rows: ``(query [M, BLOCK_D], positions [M], slopes [M])``; a position of -1 sees nothing.
        softmax: ``(maximum [M], total [M], acc [M, BLOCK_DV])``.
        cache: ``(keys of the head, its values, the row's block table)``.
        scoring: ``(window, factor on the products, soft cap in units of log2)``.
        HAS_UNMASKED: every row sees every key before ``middle``, which saves the mask there. Else ``middle`` is
            ``begin``, and one loop does it all.
    """
    query, positions, slopes = rows
    maximum, total, acc = softmax
    keys_of_head, values_of_head, table = cache
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
            # A tile ahead: loads whose addresses were loaded in the same turn get few stages from the compiler.
            blocks = _load_blocks(table, start + BLOCK_N, first_key, stop, BLOCK_SIZE, BLOCK_N)
            no_scores = tl.zeros([query.shape[0], BLOCK_N], tl.float32)
            scores = _dot(query, tl.trans(key_tile.to(query.dtype)), no_scores) * score_scale
            scores = _score(scores, keys, positions, slopes, cap, HAS_SOFTCAP, HAS_SLOPES)
            if phase == 1:
                scores = _hide_unseen(scores, keys, positions, window, HAS_WINDOW)
            maximum, total, acc = _fold_scores(maximum, total, acc, scores, value_tile.to(query.dtype))
    return maximum, total, acc


@triton.jit
def _load_tile(starts, is_read, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Keys or values ``[N, BLOCK]`` that begin at ``starts`` ``[N, 1]``; zeros for those that are not read."""
    dims = tl.arange(0, BLOCK)
    return tl.load(starts + dims[None, :], mask=is_read[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def _hide_unseen(scores, keys, positions, window, HAS_WINDOW: tl.constexpr):
    """Scores ``[M, N]``, minus infinity where the token at a row's position does not see the key."""
    is_seen = keys[None, :] <= positions[:, None]
    if HAS_WINDOW:
        is_seen = is_seen & (keys[None, :] > positions[:, None] - window)
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def _fold_scores(maximum, total, acc, scores, value_tile):
    """The running softmax with one tile more, of ``scores`` ``[M, N]`` and values ``[N, BLOCK_DV]``."""
    joined = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - joined[:, None])
    rescale = tl.exp2(maximum - joined)
    total = total * rescale + tl.sum(weights, 1)
    acc = _dot(weights.to(value_tile.dtype), value_tile, acc * rescale[:, None])
    return joined, total, acc


@triton.jit
def _load_blocks(table, start, first_key, stop, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks of keys ``start .. start + BLOCK_N``, as int64: a cache of 4 GiB has 2**31 elements of bfloat16."""
    keys = start + tl.arange(0, BLOCK_N)
    return tl.load(table + keys // BLOCK_SIZE, mask=(keys >= first_key) & (keys < stop), other=0).to(tl.int64)


@triton.jit
def _score(scores, keys, positions, slopes, cap, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr):
    """Scores in units of log2 ``[M, N]`` from scaled products, which a soft cap wants doubled and divided by it."""
    if HAS_SOFTCAP:
        # cap * tanh(scores / 2); the exponent is never positive, so nothing overflows.
        decayed = tl.exp2(-tl.abs(scores))
        scores = tl.where(scores < 0.0, -cap, cap) * ((1.0 - decayed) / (1.0 + decayed))
    if HAS_SLOPES:
        scores += slopes[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
    return scores
