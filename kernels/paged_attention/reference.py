"""Plain torch: the ground truth, and what runs on the CPU.

Decode rows go through one gather and two batched products with the query heads of a group packed together
(2.3 ms a layer at 64 requests of 256 tokens, 3 x 64 bf16, one thread; the same through scaled_dot_product_attention
18 ms). Prefill chunks go one request at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .batch import MaskRule, PagedBatch
from .gather import DecodeGroup, PrefillRow, decode_groups, prefill_rows

# Scores of a prefill chunk are made in tiles of queries of at most this many elements (64 MiB in float32).
_MAX_TILE_ELEMENTS = 1 << 24


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    mask_rule: MaskRule | None,
) -> Tensor:
    """See ``paged_attention.paged_attention``."""
    num_kv_heads = key_cache.shape[2]
    out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
    if batch.num_decodes:
        for group, cache_rows in _decode_plan(batch, window, mask_rule, num_kv_heads):
            rows = slice(0, batch.num_decodes) if group.rows is None else group.rows
            out[rows] = _decode(query[rows], key_cache, value_cache, group, cache_rows, scale, softcap, sinks)
    attend_prefill_rows(query, key_cache, value_cache, batch, scale, window, softcap, sinks, mask_rule, out)
    return out


def attend_prefill_rows(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    mask_rule: MaskRule | None,
    out: Tensor,
) -> None:
    """The rows with several query tokens, into their part of ``out``, ``[T, H, DV]``."""
    num_kv_heads = key_cache.shape[2]
    for row in batch.derived(("prefill", window, mask_rule), lambda: prefill_rows(batch, window, mask_rule)):
        keys = key_cache.view(-1, num_kv_heads, key_cache.shape[3])[row.slots]
        values = value_cache.view(-1, num_kv_heads, value_cache.shape[3])[row.slots]
        chunk = query[row.start : row.stop]
        if softcap is None and sinks is None:
            out[row.start : row.stop] = _prefill_fused(chunk, keys, values, row, scale)
        else:
            out[row.start : row.stop] = _prefill_tiled(chunk, keys, values, row, scale, softcap, sinks)


def _decode_plan(
    batch: PagedBatch, window: int | None, mask_rule: MaskRule | None, num_kv_heads: int
) -> list[tuple[DecodeGroup, Tensor]]:
    groups = batch.derived(("decode", window, mask_rule), lambda: decode_groups(batch, window, mask_rule))
    return batch.derived(
        ("decode", window, mask_rule, num_kv_heads),
        lambda: [(group, group.cache_rows(num_kv_heads)) for group in groups],
    )


def _decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    group: DecodeGroup,
    cache_rows: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One query token ``[N, H, D]`` per row of ``group``; returns ``[N, H, DV]``."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, seq_len = key_cache.shape[2], group.slots.shape[1]
    shape = (num_rows, num_kv_heads, num_heads // num_kv_heads, seq_len)
    keys = key_cache.view(-1, head_dim).index_select(0, cache_rows).view(-1, seq_len, head_dim)
    values = value_cache.view(-1, value_cache.shape[3]).index_select(0, cache_rows)
    scores = torch.bmm(query.reshape(num_rows * num_kv_heads, -1, head_dim), keys.transpose(1, 2)).view(shape)
    bias = group.bias
    weights = _softmax(scores, scale, softcap, bias, None if sinks is None else sinks.view(num_kv_heads, -1, 1))
    weights = weights.to(query.dtype).view(num_rows * num_kv_heads, -1, seq_len)
    out = torch.bmm(weights, values.view(-1, seq_len, value_cache.shape[3]))
    return out.view(num_rows, num_heads, -1)


def _prefill_fused(query: Tensor, keys: Tensor, values: Tensor, row: PrefillRow, scale: float) -> Tensor:
    """A chunk ``[query_len, H, D]`` against ``[S, KVH, D]``; returns ``[query_len, H, DV]``."""
    group_size = query.shape[1] // keys.shape[1]
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1).repeat_interleave(group_size, 0)[None],
        values.transpose(0, 1).repeat_interleave(group_size, 0)[None],
        attn_mask=row.allowed,
        is_causal=row.allowed is None,
        scale=scale,
    )
    return out[0].transpose(0, 1)


def _prefill_tiled(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    row: PrefillRow,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As ``_prefill_fused``, with scores in memory, for what the fused function does not offer."""
    (query_len, num_heads, _), (num_keys, num_kv_heads, _) = query.shape, keys.shape
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    allowed = row.allowed
    if allowed is None:
        allowed = torch.ones(query_len, num_keys, dtype=torch.bool, device=query.device).tril_()
    bias = torch.zeros(allowed.shape, device=query.device).masked_fill_(~allowed, float("-inf"))
    sink_logits = None if sinks is None else sinks.view(num_kv_heads, -1, 1, 1)
    tile_len = max(1, _MAX_TILE_ELEMENTS // (num_heads * num_keys))
    tiles = []
    for start in range(0, query_len, tile_len):
        tile = query[start : start + tile_len]
        grouped = tile.view(len(tile), num_kv_heads, -1, tile.shape[2]).permute(1, 2, 0, 3).flatten(1, 2)
        scores = torch.bmm(grouped, keys.transpose(1, 2)).view(num_kv_heads, -1, len(tile), num_keys)
        weights = _softmax(scores, scale, softcap, bias[start : start + tile_len], sink_logits).to(query.dtype)
        heads = torch.bmm(weights.flatten(1, 2), values).view(num_heads, len(tile), -1)
        tiles.append(heads.transpose(0, 1))
    return torch.cat(tiles)


def _softmax(scores: Tensor, scale: float, softcap: float | None, bias: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Float32 softmax over the last axis of ``scores * scale``; ``bias`` and ``sinks`` broadcast against it."""
    scores = scores.float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores += bias
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sink_column = sinks.float().expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink_column], dim=-1), dim=-1)[..., :-1]
