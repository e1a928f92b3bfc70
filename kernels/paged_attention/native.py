"""In C++, for the CPU: rows of one token read the cache where it lies. Prefill chunks go the reference's way, unless
results are to be the same in every batch: then every token is such a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..native import library
from . import invariant, reference
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
    if not _can_attend(query, key_cache, value_cache, variant) or batch.num_decodes == 0:
        return reference.paged_attention(query, key_cache, value_cache, batch, variant)
    out = torch.empty(query.shape, dtype=query.dtype)
    rows = batch.derived(("native", variant.window), lambda: _decode_rows(batch, variant.window))
    _attend(query, key_cache, value_cache, rows, variant.scale, out)
    reference.attend_prefill_rows(query, key_cache, value_cache, batch, variant, out)
    return out


def invariant_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    variant: Variant,
) -> Tensor:
    """The same with equal bits in every batch, of any number of tokens; else ``invariant.paged_attention``."""
    if not _can_attend(query, key_cache, value_cache, variant):
        return invariant.paged_attention(query, key_cache, value_cache, batch, variant)
    out = torch.empty(query.shape, dtype=query.dtype)
    rows = batch.derived(("native tokens", variant.window), lambda: _token_rows(batch, variant.window))
    _attend(query, key_cache, value_cache, rows, variant.scale, out)
    return out


def has_loop(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, value_dim: int) -> bool:
    """Whether the library is there, and computes heads of these sizes and types."""
    is_known = head_dim == value_dim and head_dim in _HEAD_DIMS
    return is_known and cache_dtype == dtype and library("decode", dtype) is not None


def _can_attend(query: Tensor, key_cache: Tensor, value_cache: Tensor, variant: Variant) -> bool:
    is_plain = variant.has_plain_scores and variant.mask_rule is None
    return is_plain and has_loop(query.dtype, key_cache.dtype, query.shape[2], value_cache.shape[3])


@dataclass(frozen=True)
class _Rows:
    """Tokens that attend each for itself.

    Args:
        tables: ``[R, MB]`` int64, the blocks of each token's request.
        seen: ``[R, 2]`` int64, the first position that it sees, and the one behind its last.
    """

    tables: Tensor
    seen: Tensor


def _attend(query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: _Rows, scale: float, out: Tensor) -> None:
    """Write the results of the first tokens of ``query``, those of ``rows``."""
    function = library("decode", query.dtype)
    assert function is not None  # whoever calls has asked
    if query.stride(2) != 1 or query.stride(1) != query.shape[2]:
        query = query.contiguous()
    (_, num_heads, head_dim), (_, block_size, num_kv_heads, _) = query.shape, key_cache.shape
    function(
        *(query.data_ptr(), query.stride(0), key_cache.data_ptr(), value_cache.data_ptr()),
        *(rows.tables.data_ptr(), rows.tables.stride(0), rows.seen.data_ptr(), len(rows.tables)),
        *(num_heads, num_kv_heads, head_dim, block_size, scale, out.data_ptr()),
    )


def _decode_rows(batch: PagedBatch, window: int | None) -> _Rows:
    ends = torch.tensor(batch.seq_lens[: batch.num_decodes])
    return _rows(batch.block_table[: batch.num_decodes], ends, ends, window)


def _token_rows(batch: PagedBatch, window: int | None) -> _Rows:
    row, position = batch.rows_and_positions()
    return _rows(batch.block_table[row], position + 1, batch.ends_of(row, position), window)


def _rows(tables: Tensor, after: Tensor, ends: Tensor, window: int | None) -> _Rows:
    """Of tokens at the positions before ``after`` that see what lies before ``ends``."""
    firsts = torch.zeros_like(ends) if window is None else (after - window).clamp(min=0)
    return _Rows(tables.to(torch.int64).contiguous(), torch.stack([firsts, ends], dim=1))
