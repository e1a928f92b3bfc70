"""In C++, for the CPU: a copy of bytes per token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import library
from . import reference


def store_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float,
    value_scale: float,
) -> None:
    """See ``kv_cache.store_kv_cache``."""
    function = library("store_rows")
    is_plain = slot_mapping.dtype == torch.int64 and slot_mapping.is_contiguous()
    is_copy = key.dtype == key_cache.dtype and value.dtype == value_cache.dtype
    if function is None or not (is_plain and is_copy and _has_rows(key) and _has_rows(value)):
        reference.store_kv_cache(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
        return
    for new, cache in ((key, key_cache), (value, value_cache)):
        num_tokens, num_heads, head_dim = new.shape
        size = new.element_size()
        function(
            *(new.data_ptr(), new.stride(0) * size, cache.data_ptr(), slot_mapping.data_ptr()),
            *(num_tokens, num_heads * head_dim * size),
        )


def _has_rows(heads: Tensor) -> bool:
    """Whether the heads of a token lie side by side."""
    return heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
