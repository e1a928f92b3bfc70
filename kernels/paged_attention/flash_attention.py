"""Attention of prompts by the packages of FlashAttention, imported at the first call.

Both align the causal mask with the last key, so they also compute a prompt's later parts. They refuse float32, heads of
more than 256 numbers and other shapes themselves.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .batch import PagedBatch, Variant

# FlashAttention 2 reads blocks of a multiple of this.
_PAGE_TOKENS = 256
# And copies heads of other sizes, of the whole cache.
_HEAD_MULTIPLE = 8


def copied(cache: Tensor, batch: PagedBatch) -> Tensor:
    """Return the keys or values of whole prompts, ``[T, KVH, D]``."""
    return cache.flatten(0, 1).index_select(0, batch.slot_mapping)


class FlashAttention2:
    """Package ``flash-attn`` from 2.6 on, which added caps: all prompts in one launch.

    It reads large blocks in place. Otherwise keys and values of whole prompts are copied; those of earlier parts are
    not, because no profile of memory has counted them.
    """

    package = "flash_attn"

    def supports(self, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, variant: Variant) -> bool:
        """See ``library.Library``."""
        return batch.has_whole_prompts or _has_pages(key_cache)

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, variant: Variant
    ) -> Tensor:
        """See ``library.Library``."""
        rows = batch.device_rows
        if _has_pages(key_cache):
            keys, values, table = key_cache, value_cache, _table(batch)
        else:
            keys, values, table = copied(key_cache, batch), copied(value_cache, batch), None
        return import_module(self.package).flash_attn_varlen_func(
            query,
            keys,
            values,
            rows.query_starts,
            _key_starts(batch),
            rows.max_query_len,
            rows.max_seq_len,
            block_table=table,
            **_rules(variant),
        )


class FlashAttention3:
    """FlashAttention 3, built of its folder ``hopper``: all prompts in one launch, over blocks of any size in place."""

    package = "flash_attn_interface"

    def supports(self, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, variant: Variant) -> bool:
        """See ``library.Library``."""
        return True

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, variant: Variant
    ) -> Tensor:
        """See ``library.Library``."""
        rows = batch.device_rows
        return import_module(self.package).flash_attn_with_kvcache(
            query,
            key_cache,
            value_cache,
            cache_seqlens=rows.seq_lens,
            page_table=_table(batch),
            cu_seqlens_q=rows.query_starts,
            max_seqlen_q=rows.max_query_len,
            # Parts of the keys would each have sums in float32 in memory that no profile has counted.
            num_splits=1,
            **_rules(variant),
        )


def _has_pages(cache: Tensor) -> bool:
    return cache.shape[1] % _PAGE_TOKENS == 0 and cache.shape[3] % _HEAD_MULTIPLE == 0


def _rules(variant: Variant) -> dict[str, Any]:
    """Return the arguments of both packages; a window counts the keys before the query's own."""
    window = (-1, -1) if variant.window is None else (variant.window - 1, 0)
    return {"softmax_scale": variant.scale, "causal": True, "window_size": window, "softcap": variant.softcap or 0.0}


def _table(batch: PagedBatch) -> Tensor:
    return batch.derived("int32 table", lambda: batch.block_table.int())


def _key_starts(batch: PagedBatch) -> Tensor:
    """Return where the keys of each row begin if they follow each other, ``[B + 1]`` int32."""
    if batch.has_whole_prompts:
        return batch.device_rows.query_starts
    ends = batch.device_rows.seq_lens.cumsum(0).int()
    return F.pad(ends, (1, 0))
