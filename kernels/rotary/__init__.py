"""Rotary position embedding of query and key heads, alone and followed by the write into the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import REFERENCE, KernelInputError, OnGpu, select
from ..kv_cache import CacheSlots
from . import native, reference

_IMPLEMENTATIONS = {
    REFERENCE: reference.apply_rotary,
    "cpu": native.apply_rotary,
    "cuda": OnGpu(f"{__package__}.gpu", "apply_rotary"),
}
_STORE_IMPLEMENTATIONS = {
    REFERENCE: reference.rotary_and_store,
    "cpu": native.rotary_and_store,
    "cuda": OnGpu(f"{__package__}.gpu", "rotary_and_store"),
}


def apply_rotary(heads: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False) -> Tensor:
    """Rotate each pair ``(x[i], x[i + R / 2])`` of a head by its token's angle; the rest of the head, after ``R``,
    stays.

    Args:
        heads: ``[T, H, D]``, any strides (a slice of a fused QKV needs no copy); query and key heads may be one tensor.
        cos, sin: ``[T, R]``, of the angles, ``R`` up to ``D``; both halves are equal. Dtype of ``heads``, or float32,
            in which case pairs are rotated in float32 and rounded once.
        is_interleaved: rotate pairs ``(x[2 i], x[2 i + 1])`` instead, by the same angles.

    Returns:
        ``[T, H, D]`` in the dtype of ``heads``. A token's bits do not depend on the others.

    Raises:
        KernelInputError: a shape or dtype above does not hold.

    Cost: memory bound, ``2 * T * H * D * itemsize`` bytes.
    Source: Su et al. 2021 (arXiv:2104.09864), which interleaves pairs.
    """
    _check_heads("heads", heads, cos, sin)
    return select(_IMPLEMENTATIONS, heads.device, heads.dtype)(heads, cos, sin, is_interleaved)


def rotary_and_store(
    query_key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    is_interleaved: bool = False,
) -> Tensor:
    """Apply ``apply_rotary`` to query and key heads, then ``store_kv_cache`` to keys and values.

    Rotated keys are only written to the cache, where attention reads them.

    Args:
        query_key: ``[T, H + KVH, D]``, any strides: query heads, then key heads, before the rotation.
        value: ``[T, KVH, DV]``, any strides. Both may be slices of one fused QKV.
        cos, sin, is_interleaved: as for ``apply_rotary``.
        key_cache, value_cache, slot_mapping, key_scale, value_scale: as for ``store_kv_cache``. Caches are **mutated.**

    Returns:
        The rotated query heads, ``[T, H, D]``, including those of padding. A token's bits do not depend on the others.

    Raises:
        KernelInputError: a shape, dtype, stride or scale above does not hold.

    Cost: memory bound, ``T * ((2 * H + KVH) * D + KVH * DV)`` times the itemsize of ``query_key`` and
    ``T * KVH * (D + DV)`` times that of the caches, in bytes; rotated keys are not read again.
    """
    _check_heads("query_key", query_key, cos, sin)
    num_heads = query_key.shape[1] - value.shape[1]
    if num_heads < 1:
        raise KernelInputError(f"query_key must be [T, H + {value.shape[1]}, D], got {tuple(query_key.shape)}")
    target = CacheSlots(key_cache, value_cache, slot_mapping, key_scale, value_scale)
    target.check(query_key[:, num_heads:], value)
    run = select(_STORE_IMPLEMENTATIONS, query_key.device, query_key.dtype)
    return run(query_key, value, cos, sin, target, is_interleaved)


def _check_heads(name: str, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    if heads.ndim != 3:
        raise KernelInputError(f"{name} must be [T, H, D], got {tuple(heads.shape)}")
    for which, angles in (("cos", cos), ("sin", sin)):
        fits_heads = angles.ndim == 2 and len(angles) == len(heads) and 0 < angles.shape[1] <= heads.shape[2]
        is_supported = angles.dtype in (heads.dtype, torch.float32) and angles.dtype == cos.dtype
        if not fits_heads or angles.shape[1] % 2 or angles.shape != cos.shape or not is_supported:
            raise KernelInputError(
                f"{which} must be {heads.dtype} or float32 [{len(heads)}, R] with an even R up to {heads.shape[2]}, "
                f"got {angles.dtype} {tuple(angles.shape)}"
            )
