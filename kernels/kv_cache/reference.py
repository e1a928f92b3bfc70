"""Plain torch: the ground truth, and what runs on the CPU."""

from __future__ import annotations

from torch import Tensor


def store_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See ``kv_cache.store_kv_cache``."""
    is_padding = slot_mapping < 0
    if is_padding.any():
        live = ~is_padding
        key, value, slot_mapping = key[live], value[live], slot_mapping[live]
    slots = slot_mapping.long()
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new)
