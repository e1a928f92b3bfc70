"""In C++, for the CPU: decode rows read the cache where it lies. Prefill chunks go the reference's way."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import library
from . import reference
from .batch import PagedBatch
from .variant import Variant

# The sizes that the sources have loops for.
_HEAD_DIMS = frozenset({16, 32, 64, 96, 128, 256})


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    variant: Variant,
) -> Tensor:
    """See ``paged_attention.paged_attention``."""
    function = library("decode", query.dtype)
    is_plain = variant.has_plain_scores and variant.mask_rule is None
    is_known = has_loop(query.dtype, key_cache.dtype, query.shape[2], value_cache.shape[3])
    if function is None or not is_plain or not is_known or batch.num_decodes == 0:
        return reference.paged_attention(query, key_cache, value_cache, batch, variant)
    if query.stride(2) != 1 or query.stride(1) != query.shape[2]:
        query = query.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype)
    tables, seq_lens = batch.derived(("native",), lambda: _addresses(batch))
    (_, num_heads, head_dim), (_, block_size, num_kv_heads, _) = query.shape, key_cache.shape
    function(
        *(query.data_ptr(), query.stride(0), key_cache.data_ptr(), value_cache.data_ptr()),
        *(tables.data_ptr(), tables.stride(0), seq_lens.data_ptr(), batch.num_decodes),
        *(num_heads, num_kv_heads, head_dim, block_size, variant.scale, variant.window or 0, out.data_ptr()),
    )
    reference.attend_prefill_rows(query, key_cache, value_cache, batch, variant, out)
    return out


def has_loop(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, value_dim: int) -> bool:
    """Whether the library is there, and computes heads of these sizes and types."""
    is_known = head_dim == value_dim and head_dim in _HEAD_DIMS
    return is_known and cache_dtype == dtype and library("decode", dtype) is not None


def _addresses(batch: PagedBatch) -> tuple[Tensor, Tensor]:
    """Block tables ``[B, MB]`` and lengths ``[B]`` of the decode rows."""
    tables = batch.block_table[: batch.num_decodes].to(torch.int64).contiguous()
    return tables, torch.tensor(batch.seq_lens[: batch.num_decodes])
