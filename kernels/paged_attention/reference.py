"""Reference in plain torch: the ground truth of tests, and the fallback on any device.

Decode rows use one gather and two batched products, with the query heads of a group packed together: 2.3 ms per layer
for 64 requests of 256 tokens, 3 x 64 bf16, on one thread, where scaled_dot_product_attention takes 18 ms. Prefill
chunks are computed one request at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .batch import PagedBatch, Variant
from .gather import DecodeGroup, PrefillRow, decode_groups, prefill_rows, read_cache

# Scores of a prefill chunk are computed in tiles of queries with at most this many elements (64 MiB in float32).
_MAX_TILE_ELEMENTS = 1 << 24


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    variant: Variant,
) -> Tensor:
    """See ``paged_attention.paged_attention``."""
    num_kv_heads = key_cache.shape[2]
    out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
    if batch.num_decodes:
        for group, cache_rows in _decode_plan(batch, variant, num_kv_heads):
            rows = slice(0, batch.num_decodes) if group.rows is None else group.rows
            out[rows] = _decode(query[rows], key_cache, value_cache, group, cache_rows, variant)
    attend_prefill_rows(query, key_cache, value_cache, batch, variant, out)
    return out


def attend_prefill_rows(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    variant: Variant,
    out: Tensor,
) -> None:
    """Compute the rows with several query tokens, and write them to ``out``, ``[T, H, DV]``."""
    num_kv_heads, window, mask_rule = key_cache.shape[2], variant.window, variant.mask_rule
    attend = _prefill_fused if variant.has_plain_scores else _prefill_tiled
    for row in batch.derived(("prefill", window, mask_rule), lambda: prefill_rows(batch, window, mask_rule)):
        key_slots = key_cache.view(-1, num_kv_heads, key_cache.shape[3])
        value_slots = value_cache.view(-1, num_kv_heads, value_cache.shape[3])
        keys = read_cache(key_slots, row.slots, query.dtype, variant.key_scale)
        values = read_cache(value_slots, row.slots, query.dtype, variant.value_scale)
        out[row.start : row.stop] = attend(query[row.start : row.stop], keys, values, row, variant)


def _decode_plan(batch: PagedBatch, variant: Variant, num_kv_heads: int) -> list[tuple[DecodeGroup, Tensor]]:
    window, mask_rule = variant.window, variant.mask_rule
    groups = batch.derived(("decode", window, mask_rule), lambda: decode_groups(batch, window, mask_rule))
    return batch.derived(
        ("decode", window, mask_rule, num_kv_heads),
        lambda: [(group, group.cache_rows(num_kv_heads)) for group in groups],
    )


def _decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, group: DecodeGroup, cache_rows: Tensor, variant: Variant
) -> Tensor:
    """Attend with one query token ``[N, H, D]`` per row of ``group``; return ``[N, H, DV]``."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, seq_len = key_cache.shape[2], group.slots.shape[1]
    shape = (num_rows, num_kv_heads, num_heads // num_kv_heads, seq_len)
    keys = read_cache(key_cache.view(-1, head_dim), cache_rows, query.dtype, variant.key_scale)
    values = read_cache(value_cache.view(-1, value_cache.shape[3]), cache_rows, query.dtype, variant.value_scale)
    keys = keys.view(-1, seq_len, head_dim)
    scores = torch.bmm(query.reshape(num_rows * num_kv_heads, -1, head_dim), keys.transpose(1, 2)).view(shape)
    bias = group.bias
    if variant.alibi_slopes is not None:
        distances = (group.key_positions - group.query_positions)[:, None, None]
        alibi = variant.alibi_slopes.view(num_kv_heads, -1, 1) * distances
        bias = alibi if bias is None else alibi + bias
    sinks = None if variant.sinks is None else variant.sinks.view(num_kv_heads, -1, 1)
    weights = _softmax(scores, variant, bias, sinks)
    weights = weights.to(query.dtype).view(num_rows * num_kv_heads, -1, seq_len)
    out = torch.bmm(weights, values.view(-1, seq_len, value_cache.shape[3]))
    return out.view(num_rows, num_heads, -1)


def _prefill_fused(query: Tensor, keys: Tensor, values: Tensor, row: PrefillRow, variant: Variant) -> Tensor:
    """Attend with a chunk ``[query_len, H, D]`` to ``[S, KVH, D]``; return ``[query_len, H, DV]``."""
    group_size = query.shape[1] // keys.shape[1]
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1).repeat_interleave(group_size, 0)[None],
        values.transpose(0, 1).repeat_interleave(group_size, 0)[None],
        attn_mask=row.allowed,
        is_causal=row.allowed is None,
        scale=variant.scale,
    )
    return out[0].transpose(0, 1)


def _prefill_tiled(query: Tensor, keys: Tensor, values: Tensor, row: PrefillRow, variant: Variant) -> Tensor:
    """Compute ``_prefill_fused`` with scores in memory, for options that the fused function lacks."""
    (query_len, num_heads, _), (num_keys, num_kv_heads, _) = query.shape, keys.shape
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    allowed = row.allowed
    if allowed is None:
        allowed = torch.ones(query_len, num_keys, dtype=torch.bool, device=query.device).tril_()
    bias = torch.zeros(allowed.shape, device=query.device).masked_fill_(~allowed, float("-inf"))
    if variant.alibi_slopes is not None:
        bias = variant.alibi_slopes.view(num_kv_heads, -1, 1, 1) * (row.key_positions - row.query_positions) + bias
    sinks = None if variant.sinks is None else variant.sinks.view(num_kv_heads, -1, 1, 1)
    tile_len = max(1, _MAX_TILE_ELEMENTS // (num_heads * num_keys))
    tiles = []
    for start in range(0, query_len, tile_len):
        tile = query[start : start + tile_len]
        grouped = tile.view(len(tile), num_kv_heads, -1, tile.shape[2]).permute(1, 2, 0, 3).flatten(1, 2)
        scores = torch.bmm(grouped, keys.transpose(1, 2)).view(num_kv_heads, -1, len(tile), num_keys)
        weights = _softmax(scores, variant, bias[..., start : start + tile_len, :], sinks).to(query.dtype)
        heads = torch.bmm(weights.flatten(1, 2), values).view(num_heads, len(tile), -1)
        tiles.append(heads.transpose(0, 1))
    return torch.cat(tiles)


def _softmax(scores: Tensor, variant: Variant, bias: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Return the float32 softmax over the last axis of scaled ``scores``; ``bias`` and ``sinks`` are broadcast."""
    scores = scores.float() * variant.scale
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    if bias is not None:
        scores += bias
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sink_column = sinks.float().expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink_column], dim=-1), dim=-1)[..., :-1]
