"""In C++, for the CPU: a copy of bytes per token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import library
from . import reference
from .cache_slots import CacheSlots


def store_kv_cache(key: Tensor, value: Tensor, into: CacheSlots) -> None:
    """See ``kv_cache.store_kv_cache``."""
    function = library("store_rows")
    slots = into.slot_mapping
    is_plain = slots.dtype == torch.int64 and slots.is_contiguous()
    is_copy = key.dtype == into.key_cache.dtype and value.dtype == into.value_cache.dtype
    if function is None or not (is_plain and is_copy and _has_rows(key) and _has_rows(value)):
        reference.store_kv_cache(key, value, into)
        return
    for new, cache in ((key, into.key_cache), (value, into.value_cache)):
        num_tokens, num_heads, head_dim = new.shape
        size = new.element_size()
        function(
            *(new.data_ptr(), new.stride(0) * size, cache.data_ptr(), slots.data_ptr()),
            *(num_tokens, num_heads * head_dim * size),
        )


def _has_rows(heads: Tensor) -> bool:
    """Whether the heads of a token lie side by side."""
    return heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
