"""Reference in plain torch: the ground truth of tests, and the fallback on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from .cache_slots import CacheSlots


def store_kv_cache(key: Tensor, value: Tensor, target: CacheSlots) -> None:
    """See ``kv_cache.store_kv_cache``."""
    slots = target.slot_mapping.long()
    is_padding = slots < 0
    if is_padding.any():
        live = ~is_padding
        key, value, slots = key[live], value[live], slots[live]
    pairs = (key, target.key_cache, target.key_scale), (value, target.value_cache, target.value_scale)
    for new, cache, scale in pairs:
        if new.dtype != cache.dtype:
            new, cache = quantize(new, scale, cache.dtype).view(torch.uint8), cache.view(torch.uint8)
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new)


def quantize(heads: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Divide by ``scale`` and round to eight bits; values out of range become the largest number, NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return (heads.float() / scale).clamp(-largest, largest).to(dtype)


def copy_blocks(cache: Tensor, block_pairs: Tensor) -> None:
    """See ``kv_cache.copy_blocks``."""
    pairs = block_pairs[(block_pairs >= 0).all(dim=1)].long()
    raw = cache.view(torch.uint8)
    raw.index_copy_(0, pairs[:, 1], raw[pairs[:, 0]])
