"""One attention call of a model: its shapes, its caches, and its computation over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.dispatch import AUTO
from ....kernels.kv_cache import store_kv_cache
from ....kernels.paged_attention import MaskRule, PagedBatch, paged_attention
from ....kernels.rotary import apply_rotary, rotary_and_store
from .caches import zeros


@dataclass(frozen=True)
class CacheFormat:
    """Number format of caches: ``dtype``, and the factor by which stored numbers are multiplied."""

    dtype: torch.dtype
    key_scale: float = 1.0
    value_scale: float = 1.0


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
    """

    module: nn.Module
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    dtype: torch.dtype
    window: int | None
    has_own_rule: bool
    cache_format: CacheFormat
    key_cache: Tensor | None = None
    value_cache: Tensor | None = None
    group: int = 0
    source: AttentionCall | None = None

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        """Allocate caches of its own, ``[NB, BS, KVH, D]`` each."""
        self.group = 0
        if self.source is not None:
            self.key_cache, self.value_cache = self.source.key_cache, self.source.value_cache
            return
        dtype = self.cache_format.dtype
        self.key_cache = zeros((num_blocks, block_size, *self.key_shape), dtype, device)
        self.value_cache = zeros((num_blocks, block_size, *self.value_shape), dtype, device)

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
        assert self.key_cache is not None
        assert self.value_cache is not None
        store_kv_cache(key, value, self.key_cache, self.value_cache, batch.slot_mapping, **self._scales)
        return paged_attention(
            query,
            self.key_cache,
            self.value_cache,
            batch,
            scale=scale,
            window=self.window,
            softcap=softcap,
            sinks=sinks,
            mask_rule=mask_rule if self.has_own_rule else None,
            is_batch_invariant=is_batch_invariant,
            backend=backend,
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
        assert self.key_cache is not None
        assert self.value_cache is not None
        caches = self.key_cache, self.value_cache
        query = rotary_and_store(
            query_key, value, *angles, *caches, batch.slot_mapping, is_interleaved=is_interleaved, **self._scales
        )
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
        assert self.key_cache is not None
        assert self.value_cache is not None
        if angles is not None:
            query = apply_rotary(query, *angles, is_interleaved=is_interleaved)
        return paged_attention(
            query, self.key_cache, self.value_cache, batch, window=self.window, **rules, **self._scales
        )

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one token; 0 if its source stores them."""
        if self.source is not None:
            return 0
        num_elements = self.key_shape[0] * self.key_shape[1] + self.value_shape[0] * self.value_shape[1]
        return num_elements * self.cache_format.dtype.itemsize

    @property
    def _scales(self) -> dict[str, Any]:
        return {"key_scale": self.cache_format.key_scale, "value_scale": self.cache_format.value_scale}


def caches_of(calls: list[AttentionCall]) -> list[Tensor]:
    """Return the allocated keys and values of all calls, ``[NB, BS, KVH, D]`` each. Shared caches are listed once."""
    caches = [cache for call in calls for cache in (call.key_cache, call.value_cache) if cache is not None]
    return list({id(cache): cache for cache in caches}.values())
