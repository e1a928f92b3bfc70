"""Targets of the keys and values of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch import KernelInputError

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class CacheSlots:
    """Arguments of ``store_kv_cache`` other than keys and values; see there."""

    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0

    def check(self, key: Tensor, value: Tensor) -> None:
        """Raise ``KernelInputError`` if ``key`` and ``value`` cannot be written to these caches."""
        _check_pair("key", key, self.key_cache, self.key_scale)
        _check_pair("value", value, self.value_cache, self.value_scale)
        if not self.slot_mapping.shape == key.shape[:1] == value.shape[:1]:
            raise KernelInputError(f"slot_mapping must be [{key.shape[0]}], got {tuple(self.slot_mapping.shape)}")


def _check_pair(name: str, new: Tensor, cache: Tensor, scale: float) -> None:
    if new.ndim != 3:
        raise KernelInputError(f"{name} must be [T, KVH, D], got shape {tuple(new.shape)}")
    if cache.ndim != 4 or cache.shape[2:] != new.shape[1:] or not cache.is_contiguous():
        raise KernelInputError(
            f"{name}_cache must be contiguous [NB, BS, {new.shape[1]}, {new.shape[2]}], got {tuple(cache.shape)}"
        )
    if cache.dtype not in (new.dtype, *FP8_DTYPES):
        raise KernelInputError(f"{name}_cache must have dtype {new.dtype} or be of {FP8_DTYPES}, got {cache.dtype}")
    if scale <= 0 or (scale != 1 and cache.dtype not in FP8_DTYPES):
        raise KernelInputError(f"{name}_scale must be positive, and 1 for a {cache.dtype} cache, got {scale}")
