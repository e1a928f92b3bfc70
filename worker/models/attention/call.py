"""One attention call of a model: its shapes, its caches, and its computation over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....kernels.dispatch import AUTO
from ....kernels.kv_cache import scales_per_head, store_kv_cache
from ....kernels.paged_attention import MaskRule, PagedBatch, paged_attention
from ....kernels.rotary import apply_rotary, rotary_and_store
from .caches import zeros

# Of the scales of an int8 cache, see ``kernels.kv_cache``.
_SCALE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class CacheFormat:
    """Number format of caches: ``dtype``, and for float8 the factor by which stored numbers are multiplied."""

    dtype: torch.dtype
    key_scale: float = 1.0
    value_scale: float = 1.0

    def bytes_per_head(self, dim: int) -> int:
        """Return the bytes of a head of one token, with its scales."""
        num_scales = scales_per_head(dim) if self.dtype == torch.int8 else 0
        return dim * self.dtype.itemsize + num_scales * _SCALE_DTYPE.itemsize


class Caches(NamedTuple):
    """Keys ``[NB, BS, KVH, D]`` and values ``[NB, BS, KVH, DV]`` of a layer, and the scales of int8 ones."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


@dataclass
class AttentionCall:
    """The nth attention call of a forward: of a layer, or one of several that a module makes.

    Shapes are those of its first call, so no architecture needs to be known.

    Args:
        key_shape, value_shape: ``(KVH, D)`` and ``(KVH, DV)``.
        dtype: of the queries, keys and values that are passed.
        window: positions that a token attends to; None for all before it.
        has_own_rule: neither causal nor sliding; the rule passed with each call decides.
        group: index of the block table to use, if layers have several (``pages.py``).
        source: the earlier call whose keys and values it attends to; None if it stores its own.
        prompt_library: see ``paged_attention``.
    """

    module: nn.Module
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    dtype: torch.dtype
    window: int | None
    has_own_rule: bool
    cache_format: CacheFormat
    caches: Caches | None = None
    group: int = 0
    source: AttentionCall | None = None
    prompt_library: str | None = None

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        """Allocate caches of its own, or use those of its source."""
        self.group = 0
        if self.source is not None:
            self.caches = self.source.caches
        else:
            self.caches = None  # release the earlier ones first
            self.caches = self.new_caches(num_blocks, block_size, device)

    def new_caches(self, num_blocks: int, block_size: int, device: torch.device) -> Caches:
        """Return caches for its shapes and its format."""
        shapes, dtype = (self.key_shape, self.value_shape), self.cache_format.dtype
        caches = [zeros((num_blocks, block_size, *shape), dtype, device) for shape in shapes]
        if dtype != torch.int8:
            return Caches(*caches)
        scales = [
            zeros((num_blocks, block_size, num_heads, scales_per_head(dim)), _SCALE_DTYPE, device)
            for num_heads, dim in shapes
        ]
        return Caches(*caches, *scales)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: PagedBatch,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        mask_rule: MaskRule | None = None,
        is_batch_invariant: bool = False,
        backend: str = AUTO,
    ) -> Tensor:
        """Store the step's keys and values ``[T, KVH, D]`` and attend to all stored ones; return ``[T, H, DV]``."""
        assert self.caches is not None
        caches = self.caches[:2]
        store_kv_cache(key, value, *caches, batch.slot_mapping, **self._scales)
        return paged_attention(
            query,
            *caches,
            batch,
            scale=scale,
            window=self.window,
            softcap=softcap,
            sinks=sinks,
            mask_rule=mask_rule if self.has_own_rule else None,
            is_batch_invariant=is_batch_invariant,
            backend=backend,
            prompt_library=self.prompt_library,
            **self._scales,
        )

    def rotate_and_attend(
        self,
        query_key: Tensor,
        value: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        is_interleaved: bool,
        *,
        batch: PagedBatch,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        is_batch_invariant: bool = False,
        backend: str = AUTO,
    ) -> Tensor:
        """Rotate heads ``[T, H + KVH, D]`` by the angles ``[T, R]``, if any, then do as ``attend``."""
        rules: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
        rules |= {"is_batch_invariant": is_batch_invariant, "backend": backend}
        if self.source is not None:
            return self._attend_to_source(query_key, angles, is_interleaved, batch, rules)
        if angles is None:
            query, key = query_key.tensor_split([query_key.shape[1] - value.shape[1]], dim=1)
            return self.attend(query, key, value, batch, **rules)
        assert self.caches is not None
        caches = self.caches[:2]
        query = rotary_and_store(
            query_key, value, *angles, *caches, batch.slot_mapping, is_interleaved=is_interleaved, **self._scales
        )
        rules |= {"prompt_library": self.prompt_library}
        return paged_attention(query, *caches, batch, window=self.window, **rules, **self._scales)

    def _attend_to_source(
        self,
        query: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        is_interleaved: bool,
        batch: PagedBatch,
        rules: dict[str, Any],
    ) -> Tensor:
        """Attend from queries ``[T, H, D]`` to the keys and values that the source has stored, including this
        step's.
        """
        assert self.caches is not None
        if angles is not None:
            query = apply_rotary(query, *angles, is_interleaved=is_interleaved)
        return paged_attention(query, *self.caches[:2], batch, window=self.window, **rules, **self._scales)

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one token; 0 if its source stores them."""
        if self.source is not None:
            return 0
        shapes = self.key_shape, self.value_shape
        return sum(num_heads * self.cache_format.bytes_per_head(dim) for num_heads, dim in shapes)

    @property
    def _scales(self) -> dict[str, Any]:
        if self.caches is not None and self.caches.key_scales is not None:
            return {"key_scale": self.caches.key_scales, "value_scale": self.caches.value_scales}
        return {"key_scale": self.cache_format.key_scale, "value_scale": self.cache_format.value_scale}


def caches_of(calls: list[AttentionCall]) -> list[Tensor]:
    """Return the allocated keys, values and scales of all calls, ``[NB, BS, ...]`` each, and shared ones once."""
    caches = [cache for call in calls for cache in call.caches or () if cache is not None]
    return list({id(cache): cache for cache in caches}.values())
