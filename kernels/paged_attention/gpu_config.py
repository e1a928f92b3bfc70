"""Tiles, warps and stages of the attention kernels, chosen by rule, because a tuner would delay the first request.

Measured on an H200 (Hopper) with 32 query heads over 8 (ops/gpu.md):

- Decode, 16-bit, D <= 128: tiles of 16 x 32, 4 warps, 4 stages. Deep rather than wide, because decode is memory bound
  and four programs fit a multiprocessor. 16 x 64 in 3 stages took 7% less time for 16 rows of 8k keys but seemed slower
  for 64 rows of 560 keys, since one program less fits. For a float8 cache, tiles of 128 keys take 10% less time.
- Prefill, 16-bit, D <= 128: tiles of 128 x 64, 8 warps and 3 stages reach 424 TFLOP/s for a prompt of 8k tokens (cuDNN:
  613). 128 x 128 in 2 stages reach 335; 256 x 64 reached 460, but spill registers.
- D >= 512: 8 warps and 2 stages, since the accumulator fills the registers (vLLM pull request 43257, for Gemma 4 on
  Hopper). Not measured.
- Batch-invariant: two accumulators, so 64 x 32 and 4 warps; decode uses the same tile, mostly empty.
- float32 is multiplied without tensor cores, in small tiles: correct, not fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

# Decode programs that should run concurrently on a multiprocessor.
_PROGRAMS_PER_SM = 2
_MAX_SPLITS = 128
# Shorter splits cost more to start and to reduce than they save.
_MIN_SPLIT_LEN = 64
# The smallest number of splits is used whose waves are at least this full, relative to the best number.
_GOOD_ENOUGH = 0.9
# Multiprocessors of an H100, which the interpreter simulates.
_SMS_WITHOUT_GPU = 132
# Batch-invariant attention splits keys at multiples of this position. It determines the order of additions, so it is
# the same for every model. It is long enough that reducing the parts costs a prefill little, and short enough that a
# decode of 8k keys with 8 key/value heads fills a device.
INVARIANT_SPLIT_LEN = 512


@dataclass(frozen=True)
class Tile:
    """Layout of one launch.

    Args:
        heads: query heads of a group per program.
        block_m: rows of a program: query tokens times ``heads``, rounded up; at least 16, as ``tl.dot`` requires.
        block_n: keys per step.
    """

    heads: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_tile(group_size: int, dim: int, itemsize: int, cache_itemsize: int) -> Tile:
    """Return the tile for one query token per row; ``dim`` is the larger of the padded ``D`` and ``DV``."""
    heads = min(group_size, _max_heads(dim))
    block_m = max(16, _power_of_two(heads))
    if itemsize == 4:
        return Tile(heads, block_m, 32 if dim <= 128 else 16, 8, 2)
    if dim >= 512:
        return Tile(heads, block_m, 32 if dim <= 512 else 16, 8, 2)
    if dim > 128:
        return Tile(heads, block_m, 32, 4, 3)
    return Tile(heads, block_m, 32, 4, 4) if cache_itemsize == 2 else Tile(heads, block_m, 128, 4, 3)


def varlen_tile(group_size: int, dim: int, itemsize: int, cache_itemsize: int, max_query_len: int) -> Tile:
    """Return the tile for rows of any number of query tokens; few tokens use ``decode_tile``, so a model has two."""
    small = decode_tile(group_size, dim, itemsize, cache_itemsize)
    if max_query_len * small.heads <= small.block_m:
        return small
    return _large_tile(small.heads, dim, itemsize)


def invariant_tile(group_size: int, dim: int, itemsize: int) -> Tile:
    """Return one tile for prefill and decode, because the order of additions in a product may depend on it."""
    heads = min(group_size, _max_heads(dim))
    if itemsize == 4 or dim > 128:
        return _large_tile(heads, dim, itemsize)
    return Tile(heads, 64, 32, 4, 3)


def num_splits(num_programs: int, max_keys: int, num_sms: int) -> int:
    """Return the number of splits of the keys of a decode row; each split adds ``num_programs`` programs.

    This is the smallest number whose waves of programs are nearly as full as possible, as in FlashAttention's
    ``num_splits_heuristic``. It does not depend on the actual lengths, so a captured graph can reuse it.
    """
    slots = _PROGRAMS_PER_SM * num_sms
    counts = range(1, max(1, min(_MAX_SPLITS, max_keys // _MIN_SPLIT_LEN)) + 1)
    if num_programs >= slots:
        return 1
    fullness = [num_programs * count / slots / -(-num_programs * count // slots) for count in counts]
    return next(c for c, full in zip(counts, fullness, strict=True) if full >= _GOOD_ENOUGH * max(fullness))


def fills_device(num_programs: int, num_sms: int) -> bool:
    """Return whether this many programs fill the device without splits."""
    return num_programs >= _PROGRAMS_PER_SM * num_sms


@cache
def sm_count(device: torch.device) -> int:
    """Return the number of multiprocessors of ``device``."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _SMS_WITHOUT_GPU


def padded(dim: int) -> int:
    """Return ``dim`` padded to a power of two, at least 16."""
    return max(16, _power_of_two(dim))


def _large_tile(heads: int, dim: int, itemsize: int) -> Tile:
    if itemsize == 4:
        return Tile(heads, max(32, _power_of_two(heads)), 32 if dim <= 128 else 16, 8, 2)
    if dim < 64:
        # With D = 32 and DV = 16 in float8, code of Triton 3.6 for 128 x 128 reads beyond its shared memory.
        return Tile(heads, 64, 32, 4, 3)
    if dim <= 128:
        return Tile(heads, 128, 64, 8, 3)
    if dim <= 256:
        return Tile(heads, 64, 32, 8, 2)
    return Tile(heads, 16, 32 if dim <= 512 else 16, 8, 2)


def _max_heads(dim: int) -> int:
    """Return the number of heads per program whose float32 accumulator leaves enough registers."""
    return 64 if dim <= 256 else 16


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
