"""Reference in plain torch: the ground truth of tests, and the fallback on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kv_cache import reference as kv_cache_reference
from ..kv_cache.cache_slots import CacheSlots


def apply_rotary(heads: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool = False) -> Tensor:
    """See ``rotary.apply_rotary``."""
    rotating = heads[..., : cos.shape[1]].to(cos.dtype)
    if is_interleaved:
        first, second = rotating[..., ::2], rotating[..., 1::2]
        half_cos, half_sin = (angles[:, None, : cos.shape[1] // 2] for angles in (cos, sin))
        pairs = first * half_cos - second * half_sin, second * half_cos + first * half_sin
        rotated = torch.stack(pairs, dim=-1).flatten(-2)
    else:
        first, second = rotating.chunk(2, dim=-1)
        swapped = torch.cat((-second, first), dim=-1)
        rotated = rotating * cos[:, None] + swapped.mul_(sin[:, None])
    rotated = rotated.to(heads.dtype)
    return rotated if rotating.shape == heads.shape else torch.cat((rotated, heads[..., cos.shape[1] :]), dim=-1)


def rotary_and_store(
    query_key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, target: CacheSlots, is_interleaved: bool = False
) -> Tensor:
    """See ``rotary.rotary_and_store``."""
    rotated = apply_rotary(query_key, cos, sin, is_interleaved)
    query, key = rotated.tensor_split([rotated.shape[1] - value.shape[1]], dim=1)
    kv_cache_reference.store_kv_cache(key, value, target)
    return query
