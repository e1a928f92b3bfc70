"""Compiled kernel for the CPU: rows of one token read the cache in place.

The reference computes prefill chunks. For batch-invariant results every token of a chunk is a row of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..native import library
from . import invariant, reference
from .batch import PagedBatch, Variant

# Sizes that the sources have loops for.
_HEAD_DIMS = frozenset({16, 32, 64, 96, 128, 256})


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    variant: Variant,
) -> Tensor:
    """See ``paged_attention.paged_attention``."""
    if not _can_attend(query, key_cache, value_cache, variant) or batch.num_decodes == 0:
        return reference.paged_attention(query, key_cache, value_cache, batch, variant)
    out = torch.empty(query.shape, dtype=query.dtype)
    rows = batch.derived(("native", variant.window), lambda: _decode_rows(batch, variant.window))
    _attend_decodes(query, key_cache, value_cache, rows, variant.scale, out)
    reference.attend_prefill_rows(query, key_cache, value_cache, batch, variant, out)
    return out


def invariant_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    variant: Variant,
) -> Tensor:
    """Compute ``paged_attention`` with equal bits in every batch; fall back to ``invariant.paged_attention``."""
    if not _can_attend(query, key_cache, value_cache, variant):
        return invariant.paged_attention(query, key_cache, value_cache, batch, variant)
    out = torch.empty(query.shape, dtype=query.dtype)
    rows = batch.derived(("native tokens", variant.window), lambda: _token_rows(batch, variant.window))
    _attend_decodes(query, key_cache, value_cache, rows, variant.scale, out)
    return out


def has_loop(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, value_dim: int) -> bool:
    """Return whether the library is loaded and supports heads of these sizes and dtypes."""
    is_supported = head_dim == value_dim and head_dim in _HEAD_DIMS
    return is_supported and cache_dtype == dtype and library("decode", dtype) is not None


def _can_attend(query: Tensor, key_cache: Tensor, value_cache: Tensor, variant: Variant) -> bool:
    is_plain = variant.has_plain_scores and variant.mask_rule is None
    return is_plain and has_loop(query.dtype, key_cache.dtype, query.shape[2], value_cache.shape[3])


@dataclass(frozen=True)
class _Rows:
    """Tokens that attend separately.

    Args:
        tables: ``[R, MB]`` int64, the blocks of each token's request.
        ranges: ``[R, 2]`` int64, start and end of the positions that the token sees.
    """

    tables: Tensor
    ranges: Tensor


def _attend_decodes(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: _Rows, scale: float, out: Tensor
) -> None:
    """Write the results of the first ``len(rows.tables)`` tokens of ``query``."""
    function = library("decode", query.dtype)
    assert function is not None  # the callers have checked
    if query.stride(2) != 1 or query.stride(1) != query.shape[2]:
        query = query.contiguous()
    (_, num_heads, head_dim), (_, block_size, num_kv_heads, _) = query.shape, key_cache.shape
    caches = key_cache.data_ptr(), value_cache.data_ptr()
    tables = rows.tables.data_ptr(), rows.tables.stride(0), rows.ranges.data_ptr(), len(rows.tables)
    shape = num_heads, num_kv_heads, head_dim, block_size
    function(query.data_ptr(), query.stride(0), *caches, *tables, *shape, scale, out.data_ptr())


def _decode_rows(batch: PagedBatch, window: int | None) -> _Rows:
    ends = torch.tensor(batch.seq_lens[: batch.num_decodes])
    return _make_rows(batch.block_table[: batch.num_decodes], ends, ends, window)


def _token_rows(batch: PagedBatch, window: int | None) -> _Rows:
    row, position = batch.rows_and_positions()
    return _make_rows(batch.block_table[row], position + 1, batch.token_ends(row, position), window)


def _make_rows(tables: Tensor, next_positions: Tensor, ends: Tensor, window: int | None) -> _Rows:
    """Return the rows of tokens at positions ``next_positions - 1`` that see positions before ``ends``."""
    firsts = torch.zeros_like(ends) if window is None else (next_positions - window).clamp(min=0)
    return _Rows(tables.to(torch.int64).contiguous(), torch.stack([firsts, ends], dim=1))
