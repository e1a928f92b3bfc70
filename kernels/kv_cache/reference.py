"""Plain torch: the ground truth, and what runs on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


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
    is_padding = slot_mapping < 0
    if is_padding.any():
        live = ~is_padding
        key, value, slot_mapping = key[live], value[live], slot_mapping[live]
    slots = slot_mapping.long()
    for new, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
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
