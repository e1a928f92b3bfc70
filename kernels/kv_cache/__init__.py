"""Write keys and values into the paged KV cache, and copy its blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import REFERENCE, TRITON_DTYPES, KernelInputError, OnGpu, select
from . import native, reference
from .cache_slots import EIGHT_BIT_DTYPES, FP8_DTYPES, CacheSlots, check_scale, scales_per_head

__all__ = [
    "EIGHT_BIT_DTYPES",
    "FP8_DTYPES",
    "CacheSlots",
    "check_scale",
    "copy_blocks",
    "scales_per_head",
    "store_kv_cache",
]

_STORE_IMPLEMENTATIONS = {
    REFERENCE: reference.store_kv_cache,
    "cpu": native.store_kv_cache,
    "cuda": OnGpu(f"{__package__}.gpu", "store_kv_cache"),
}
_COPY_IMPLEMENTATIONS = {
    REFERENCE: reference.copy_blocks,
    "cuda": OnGpu(f"{__package__}.gpu", "copy_blocks", dtypes=(*TRITON_DTYPES, *EIGHT_BIT_DTYPES)),
}


def store_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float | Tensor = 1.0,
    value_scale: float | Tensor = 1.0,
) -> None:
    """Scatter this step's keys and values into the paged KV cache, in place.

    Token ``i`` goes to slot ``slot_mapping[i]``: row ``slot % BS`` of block ``slot // BS``.
    A token with a negative slot is padding and is skipped, so a captured graph may run with fewer live tokens.

    A float8 cache stores ``saturate(key / key_scale)``: values beyond its largest number, 448 or 57,344, become that
    number, and NaN stays NaN. Attention multiplies by the same scale when it reads. An int8 cache gets a scale for each
    32 dimensions of a head, so that the largest of them is 127. It is NaN or infinite if one of them is.

    Args:
        key: ``[T, KVH, D]``, any strides (a slice of a fused QKV needs no copy).
        value: ``[T, KVH, DV]``, any strides; ``DV`` may differ from ``D``. Dtype and device of ``key``.
        key_cache: ``[NB, BS, KVH, D]``, contiguous, dtype of ``key``, float8 of either kind, or int8. **Mutated.**
        value_cache: ``[NB, BS, KVH, DV]``, contiguous, dtype of ``key_cache``. **Mutated.**
        slot_mapping: ``[T]`` int32 or int64, values in ``[-1, NB * BS)``; non-negative slots are unique.
        key_scale, value_scale: scales of a float8 cache; 1 for any other. For an int8 cache the scales of its numbers,
            ``[NB, BS, KVH, ceil(D / 32)]`` bfloat16, contiguous. **Mutated.**

    Raises:
        KernelInputError: a shape, dtype, stride or scale above does not hold.

    Cost: memory bound, ``T * KVH * (D + DV)`` times the itemsizes of ``key`` and of its cache, in bytes. A token's
    bits do not depend on the others.
    On a GPU, float8_e4m3fn needs compute capability 8.9 (Ada, Hopper).
    Source: Kwon et al. 2023 (arXiv:2309.06180), section 4; Micikevicius et al. 2022 (arXiv:2209.05433) for float8.
    """
    target = CacheSlots(key_cache, value_cache, slot_mapping, key_scale, value_scale)
    target.check(key, value)
    select(_STORE_IMPLEMENTATIONS, key.device, key.dtype)(key, value, target)


def copy_blocks(cache: Tensor, block_pairs: Tensor) -> None:
    """Copy whole blocks within a cache, in place.

    Args:
        cache: ``[NB, ...]``, contiguous, of any dtype. **Mutated.**
        block_pairs: ``[N, 2]`` int32 or int64, source and target of each copy. A pair with a negative number is
            padding. A target occurs in no other pair.

    Raises:
        KernelInputError: a shape, dtype or stride above does not hold.

    Cost: memory bound, ``2 * N`` blocks. Bit-exact.
    """
    if cache.ndim < 2 or not cache.is_contiguous():
        raise KernelInputError(f"cache must be contiguous [NB, ...], got {tuple(cache.shape)}")
    if block_pairs.ndim != 2 or block_pairs.shape[1] != 2 or block_pairs.dtype not in (torch.int32, torch.int64):
        raise KernelInputError(
            f"block_pairs must be int32 or int64 [N, 2], got {block_pairs.dtype} {tuple(block_pairs.shape)}"
        )
    select(_COPY_IMPLEMENTATIONS, cache.device, cache.dtype)(cache, block_pairs)
