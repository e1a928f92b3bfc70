"""Targets of the keys and values of a step, and the number formats of caches in eight bits.

A float8 cache has one factor for all its numbers. An int8 cache has a scale, bfloat16, for each 32 dimensions of a
token's head: of 64 bytes in 16 bits it takes 34.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch import KernelInputError

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
EIGHT_BIT_DTYPES = (*FP8_DTYPES, torch.int8)
# Dimensions of a head that share a scale in an int8 cache.
SCALED_DIMS = 32
INT8_LARGEST = 127.0


def scales_per_head(head_dim: int) -> int:
    """Return the number of scales of a head in an int8 cache; the last may be of fewer than 32 dimensions."""
    return -(-head_dim // SCALED_DIMS)


def check_scale(name: str, scale: float | Tensor, cache: Tensor) -> None:
    """Raise ``KernelInputError`` if ``scale`` does not fit the dtype and shape of ``cache``, ``[NB, BS, KVH, D]``."""
    if cache.dtype == torch.int8:
        shape = (*cache.shape[:3], scales_per_head(cache.shape[3]))
        if not isinstance(scale, Tensor) or scale.shape != shape or scale.dtype != torch.bfloat16:
            raise KernelInputError(f"{name} of an int8 cache must be bfloat16 {list(shape)}, got {_describe(scale)}")
        if not scale.is_contiguous():
            raise KernelInputError(f"{name} must be contiguous")
    elif isinstance(scale, Tensor) or scale <= 0 or (scale != 1 and cache.dtype not in FP8_DTYPES):
        raise KernelInputError(
            f"{name} must be positive, and 1 for a {cache.dtype} cache that is not float8, got {_describe(scale)}"
        )


def _describe(scale: float | Tensor) -> str:
    return f"{scale.dtype} {list(scale.shape)}" if isinstance(scale, Tensor) else str(scale)


@dataclass(frozen=True)
class CacheSlots:
    """Arguments of ``store_kv_cache`` other than keys and values; see there."""

    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    key_scale: float | Tensor = 1.0
    value_scale: float | Tensor = 1.0

    def check(self, key: Tensor, value: Tensor) -> None:
        """Raise ``KernelInputError`` if ``key`` and ``value`` cannot be written to these caches."""
        _check_pair("key", key, self.key_cache, self.key_scale)
        _check_pair("value", value, self.value_cache, self.value_scale)
        if not self.slot_mapping.shape == key.shape[:1] == value.shape[:1]:
            raise KernelInputError(f"slot_mapping must be [{key.shape[0]}], got {tuple(self.slot_mapping.shape)}")


def _check_pair(name: str, new: Tensor, cache: Tensor, scale: float | Tensor) -> None:
    if new.ndim != 3:
        raise KernelInputError(f"{name} must be [T, KVH, D], got shape {tuple(new.shape)}")
    if cache.ndim != 4 or cache.shape[2:] != new.shape[1:] or not cache.is_contiguous():
        raise KernelInputError(
            f"{name}_cache must be contiguous [NB, BS, {new.shape[1]}, {new.shape[2]}], got {tuple(cache.shape)}"
        )
    if cache.dtype not in (new.dtype, *EIGHT_BIT_DTYPES):
        raise KernelInputError(
            f"{name}_cache must have dtype {new.dtype} or be of {EIGHT_BIT_DTYPES}, got {cache.dtype}"
        )
    check_scale(f"{name}_scale", scale, cache)
