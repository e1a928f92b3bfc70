"""Compiled kernel for the CPU: a copy of bytes per token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import library
from . import reference
from .cache_slots import CacheSlots


def store_kv_cache(key: Tensor, value: Tensor, target: CacheSlots) -> None:
    """See ``kv_cache.store_kv_cache``."""
    function = library("store_rows")
    slots = target.slot_mapping
    is_plain = slots.dtype == torch.int64 and slots.is_contiguous()
    is_copy = key.dtype == target.key_cache.dtype and value.dtype == target.value_cache.dtype
    if function is None or not (is_plain and is_copy and _has_adjacent_heads(key) and _has_adjacent_heads(value)):
        reference.store_kv_cache(key, value, target)
        return
    for new, cache in ((key, target.key_cache), (value, target.value_cache)):
        num_tokens, num_heads, head_dim = new.shape
        stride, row_bytes = new.stride(0) * new.itemsize, num_heads * head_dim * new.itemsize
        function(new.data_ptr(), stride, cache.data_ptr(), slots.data_ptr(), num_tokens, row_bytes)


def _has_adjacent_heads(heads: Tensor) -> bool:
    """Return whether the heads of a token are adjacent in memory."""
    return heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
