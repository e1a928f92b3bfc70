"""Writing keys and values into the paged KV cache."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import REFERENCE, select
from ..errors import KernelInputError
from . import native, reference

_IMPLEMENTATIONS = {REFERENCE: reference.store_kv_cache, "cpu": native.store_kv_cache}


def store_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Scatter this step's keys and values into the paged KV cache, in place.

    Token ``i`` goes to slot ``slot_mapping[i]``: row ``slot % BS`` of block ``slot // BS``.
    A negative slot is padding and is skipped, so a captured graph may run with fewer live tokens.

    Args:
        key: ``[T, KVH, D]``, any strides (a slice of a fused QKV needs no copy).
        value: ``[T, KVH, DV]``, any strides; ``DV`` may differ from ``D``.
        key_cache: ``[NB, BS, KVH, D]``, contiguous, dtype of ``key``. **Mutated.**
        value_cache: ``[NB, BS, KVH, DV]``, contiguous, dtype of ``value``. **Mutated.**
        slot_mapping: ``[T]`` int32 or int64, values in ``[-1, NB * BS)``; non-negative slots are unique.

    Raises:
        KernelInputError: a shape, dtype or stride above does not hold.

    Cost: memory bound, ``2 * T * KVH * (D + DV) * itemsize`` bytes.
    Source: Kwon et al. 2023 (arXiv:2309.06180), section 4.
    """
    _check_pair("key", key, key_cache)
    _check_pair("value", value, value_cache)
    if not slot_mapping.shape == key.shape[:1] == value.shape[:1]:
        raise KernelInputError(f"slot_mapping must be [{key.shape[0]}], got {tuple(slot_mapping.shape)}")
    select(_IMPLEMENTATIONS, key.device, key.dtype)(key, value, key_cache, value_cache, slot_mapping)


def _check_pair(name: str, new: Tensor, cache: Tensor) -> None:
    if new.ndim != 3:
        raise KernelInputError(f"{name} must be [T, KVH, D], got shape {tuple(new.shape)}")
    if cache.ndim != 4 or cache.shape[2:] != new.shape[1:] or not cache.is_contiguous():
        raise KernelInputError(
            f"{name}_cache must be contiguous [NB, BS, {new.shape[1]}, {new.shape[2]}], got {tuple(cache.shape)}"
        )
    if cache.dtype != new.dtype:
        raise KernelInputError(f"{name}_cache must have dtype {new.dtype}, got {cache.dtype}")
