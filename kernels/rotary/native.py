"""Compiled kernel for the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kv_cache import native as kv_cache_native
from ..kv_cache.cache_slots import CacheSlots
from ..native import library
from . import reference


def apply_rotary(heads: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool = False) -> Tensor:
    """See ``rotary.apply_rotary``."""
    function = library("rotary", heads.dtype)
    is_plain = heads.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous() and cos.dtype == heads.dtype
    if function is None or not is_plain or cos.shape[1] != heads.shape[2] or is_interleaved:
        return reference.apply_rotary(heads, cos, sin, is_interleaved)
    out = torch.empty(heads.shape, dtype=heads.dtype)
    angles = cos.data_ptr(), sin.data_ptr()
    function(heads.data_ptr(), heads.stride(0), heads.stride(1), *angles, out.data_ptr(), *heads.shape)
    return out


def rotary_and_store(
    query_key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, target: CacheSlots, is_interleaved: bool = False
) -> Tensor:
    """See ``rotary.rotary_and_store``."""
    rotated = apply_rotary(query_key, cos, sin, is_interleaved)
    query, key = rotated.tensor_split([rotated.shape[1] - value.shape[1]], dim=1)
    kv_cache_native.store_kv_cache(key, value, target)
    return query
