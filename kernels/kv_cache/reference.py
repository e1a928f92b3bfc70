"""Reference in plain torch: the ground truth of tests, and the fallback on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache_slots import INT8_LARGEST, SCALED_DIMS, CacheSlots


def store_kv_cache(key: Tensor, value: Tensor, target: CacheSlots) -> None:
    """See ``kv_cache.store_kv_cache``."""
    slots = target.slot_mapping.long()
    is_padding = slots < 0
    if is_padding.any():
        live = ~is_padding
        key, value, slots = key[live], value[live], slots[live]
    pairs = (key, target.key_cache, target.key_scale), (value, target.value_cache, target.value_scale)
    for new, cache, scale in pairs:
        if isinstance(scale, Tensor):
            new, scales = quantize_to_bytes(new)
            scale.view(-1, *scale.shape[2:]).index_copy_(0, slots, scales)
        elif new.dtype != cache.dtype:
            new, cache = quantize(new, scale, cache.dtype).view(torch.uint8), cache.view(torch.uint8)
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new)


def quantize(heads: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Divide by ``scale`` and round to eight bits; values out of range become the largest number, NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return (heads.float() / scale).clamp(-largest, largest).to(dtype)


def quantize_to_bytes(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``[..., D]`` as int8, and the scale of each 32 dimensions, ``[..., ceil(D / 32)]`` bfloat16."""
    dim = heads.shape[-1]
    blocks = F.pad(heads.float(), (0, -dim % SCALED_DIMS)).unflatten(-1, (-1, SCALED_DIMS))
    largest = blocks.abs().amax(dim=-1)
    # Divide by a tensor: on a GPU torch divides by a number by multiplying with its reciprocal, which rounds twice.
    scales = (largest / torch.full_like(largest, INT8_LARGEST)).to(torch.bfloat16)
    wide = scales.float()[..., None]
    steps = torch.where((wide > 0) & wide.isfinite(), torch.floor(blocks / wide + 0.5), 0.0)
    # The scale may have been rounded down.
    return steps.clamp(-INT8_LARGEST, INT8_LARGEST).to(torch.int8).flatten(-2)[..., :dim], scales


def dequantize_bytes(heads: Tensor, scales: Tensor) -> Tensor:
    """Return what ``quantize_to_bytes`` has rounded, in float32."""
    return heads.float() * scales.float().repeat_interleave(SCALED_DIMS, -1)[..., : heads.shape[-1]]


def copy_blocks(cache: Tensor, block_pairs: Tensor) -> None:
    """See ``kv_cache.copy_blocks``."""
    pairs = block_pairs[(block_pairs >= 0).all(dim=1)].long()
    raw = cache.view(torch.uint8)
    raw.index_copy_(0, pairs[:, 1], raw[pairs[:, 0]])
