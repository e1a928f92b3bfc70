"""Plain torch: the ground truth, and what runs on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .cache_slots import CacheSlots


def store_kv_cache(key: Tensor, value: Tensor, into: CacheSlots) -> None:
    """See ``kv_cache.store_kv_cache``."""
    slots = into.slot_mapping.long()
    is_padding = slots < 0
    if is_padding.any():
        live = ~is_padding
        key, value, slots = key[live], value[live], slots[live]
    pairs = (key, into.key_cache, into.key_scale), (value, into.value_cache, into.value_scale)
    for new, cache, scale in pairs:
        if new.dtype != cache.dtype:
            new, cache = quantize(new, scale, cache.dtype).view(torch.uint8), cache.view(torch.uint8)
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new)


def quantize(heads: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Divide by ``scale`` and round to eight bits; what is too large becomes the largest number, NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return (heads.float() / scale).clamp(-largest, largest).to(dtype)


def copy_blocks(cache: Tensor, block_pairs: Tensor) -> None:
    """See ``kv_cache.copy_blocks``."""
    pairs = block_pairs[(block_pairs >= 0).all(dim=1)].long()
    of_bytes = cache.view(torch.uint8)
    of_bytes.index_copy_(0, pairs[:, 1], of_bytes[pairs[:, 0]])
