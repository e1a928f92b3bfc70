"""Tiles, warps and stages of the attention kernels, chosen by rule: a tuner would make the first request wait.

For Hopper, tried on an H200 with 32 query heads over 8 (ops/lab/reports/gpu.md):

- Decode, 16-bit, D <= 128: tiles of 16 x 32, 4 warps, 4 stages. Deep rather than wide, because it waits for memory, and
  four programs fit a multiprocessor. 16 x 64 in 3 stages took 7% less time for 16 rows of 8k keys, but 64 rows of 560
  seemed to be slower, of which a program less fits. From a float8 cache tiles are of 128 keys: 10% less.
- Prefill, 16-bit, D <= 128: tiles of 128 x 64, 8 warps and 3 stages, 424 TFLOP/s for a prompt of 8k tokens (cuDNN:
  613). 128 x 128 in 2 stages has 335; 256 x 64 had 460, and spills registers.
- D >= 512: 8 warps and 2 stages, since the accumulator fills the registers (vLLM pull request 43257, for Gemma 4 on
  Hopper). Not tried.
- Batch-invariant: two accumulators, so 64 x 32 and 4 warps; decode goes through the same tile, mostly empty.
- float32 is multiplied without tensor cores, in small tiles: right, not fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

# Decode programs that should run at once on a multiprocessor.
_PROGRAMS_PER_SM = 2
_MAX_SPLITS = 128
# Shorter splits cost more to start and to join than they save.
_MIN_SPLIT_LEN = 64
# A count of splits may leave this much more of the last wave idle than the best count would, if it is smaller.
_GOOD_ENOUGH = 0.9
# An H100's; the interpreter does what such a device would do.
_SMS_WITHOUT_GPU = 132
# Keys between the absolute positions at which batch-invariant attention cuts. Part of the order of additions, so the
# same for every model; long enough that folding the parts costs a prefill little, short enough that a decode of 8k
# keys with 8 key/value heads fills a device.
INVARIANT_SPLIT_LEN = 512


@dataclass(frozen=True)
class Tile:
    """How one launch is laid out.

    Args:
        heads: query heads of a group in one program.
        block_m: rows of a program: query tokens times ``heads``, rounded up; at least 16, as ``tl.dot`` wants.
        block_n: keys of a step.
    """

    heads: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_tile(group_size: int, dim: int, itemsize: int, cache_itemsize: int) -> Tile:
    """For one query token a row; ``dim`` is the larger of the padded ``D`` and ``DV``."""
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
    """For rows of any number of query tokens. Few tokens get ``decode_tile``'s: two layouts in all for a model."""
    small = decode_tile(group_size, dim, itemsize, cache_itemsize)
    if max_query_len * small.heads <= small.block_m:
        return small
    return _large_tile(small.heads, dim, itemsize)


def invariant_tile(group_size: int, dim: int, itemsize: int) -> Tile:
    """One layout for prefill and decode, because the order of additions inside a product may follow it."""
    heads = min(group_size, _max_heads(dim))
    if itemsize == 4 or dim > 128:
        return _large_tile(heads, dim, itemsize)
    return Tile(heads, 64, 32, 4, 3)


def num_splits(num_programs: int, max_keys: int, num_sms: int) -> int:
    """Into how many parts to cut the keys of a decode row, when each part makes ``num_programs`` programs.

    The smallest number whose last wave of programs is about as full as can be (the idea is FlashAttention's
    ``num_splits_heuristic``). It knows nothing of the actual lengths, so a captured graph may keep it.
    """
    slots = _PROGRAMS_PER_SM * num_sms
    counts = range(1, max(1, min(_MAX_SPLITS, max_keys // _MIN_SPLIT_LEN)) + 1)
    if num_programs >= slots:
        return 1
    fullness = [num_programs * count / slots / -(-num_programs * count // slots) for count in counts]
    return next(c for c, full in zip(counts, fullness, strict=True) if full >= _GOOD_ENOUGH * max(fullness))


def fills_device(num_programs: int, num_sms: int) -> bool:
    """Whether so many programs need not be split."""
    return num_programs >= _PROGRAMS_PER_SM * num_sms


@cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of ``device``."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _SMS_WITHOUT_GPU


def padded(dim: int) -> int:
    """``dim`` as a tile has it: a power of two, at least 16."""
    return max(16, _power_of_two(dim))


def _large_tile(heads: int, dim: int, itemsize: int) -> Tile:
    if itemsize == 4:
        return Tile(heads, max(32, _power_of_two(heads)), 32 if dim <= 128 else 16, 8, 2)
    if dim < 64:
        # With D = 32 and DV = 16 in float8 what Triton 3.6 makes of 128 x 128 reads behind its shared memory.
        return Tile(heads, 64, 32, 4, 3)
    if dim <= 128:
        return Tile(heads, 128, 64, 8, 3)
    if dim <= 256:
        return Tile(heads, 64, 32, 8, 2)
    return Tile(heads, 16, 32 if dim <= 512 else 16, 8, 2)


def _max_heads(dim: int) -> int:
    """Heads of a program whose float32 accumulator leaves registers for the rest."""
    return 64 if dim <= 256 else 16


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
