"""Batch-invariant attention in plain torch: a token's result does not depend on the other tokens of the batch.

It runs if no kernel has that property. On a CPU ``native.py`` has it for plain scores.

The reference multiplies matrices whose shapes depend on the batch, and a product of another shape may add in another
order. Here every product has the same shape. A token reads its keys in tiles of ``_TILE_LEN`` positions that begin at
its multiples, and folds them in order into a running softmax. The token that sees the most keys determines the number
of tiles. After its own last tile, a token sees no key, which changes nothing: its maximum stays, so its sums are
multiplied by 1 and 0 is added.

This relies on the device in one respect: each of the ``T * KVH`` products of equal shape in one call must have the
same bits at any index. So results agree between batches of the same ``T``; ``loading/fixed_shapes.py`` verifies it.

Keys are gathered for each token separately, even if its neighbours read the same keys, which slows long prefills.
Source: Dao et al. 2022 (arXiv:2205.14135), section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import MaskRule, PagedBatch, Variant
from .gather import read_cache

# The same for every model and context, because it determines the order of additions.
_TILE_LEN = 128
# Finite, so that a tile without visible keys does not subtract infinity from itself.
_EMPTY_MAXIMUM = torch.finfo(torch.float32).min


@dataclass
class KeyTile:
    """The nth tile of keys of every token, ``L`` positions each.

    Args:
        slots: ``[T, L]`` cache slots; for a key that a token does not see, its own slot, which certainly holds numbers.
        bias: ``[T, 1, 1, L]`` float32, 0 for visible keys and minus infinity for others.
        query_positions: ``[T, 1]``.
        key_positions: ``[T, L]``.
    """

    slots: Tensor
    bias: Tensor
    query_positions: Tensor
    key_positions: Tensor

    def cache_rows(self, num_kv_heads: int) -> Tensor:
        """Return indices ``[T * KVH * L]`` into a cache as ``[NB * BS * KVH, D]``, so that one gather sorts by head."""
        heads = torch.arange(num_kv_heads, device=self.slots.device)[None, :, None]
        return (self.slots[:, None, :] * num_kv_heads + heads).view(-1)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    variant: Variant,
) -> Tensor:
    """See ``paged_attention.paged_attention``."""
    (num_tokens, num_heads, key_dim), num_kv_heads = query.shape, key_cache.shape[2]
    value_dim = value_cache.shape[3]
    shape = (num_tokens, num_kv_heads, num_heads // num_kv_heads)
    grouped = query.reshape(num_tokens * num_kv_heads, -1, key_dim)
    maximum, total = _initial_softmax_state(shape, variant.sinks, query.device)
    out = torch.zeros(*shape, value_dim, device=query.device)
    for tile, rows in _plan(batch, variant.window, variant.mask_rule, num_kv_heads):
        keys = read_cache(key_cache.view(-1, key_dim), rows, query.dtype, variant.key_scale)
        values = read_cache(value_cache.view(-1, value_dim), rows, query.dtype, variant.value_scale)
        keys, values = keys.view(len(grouped), -1, key_dim), values.view(len(grouped), -1, value_dim)
        scores = torch.bmm(grouped, keys.transpose(1, 2)).view(*shape, -1).float() * variant.scale
        if variant.softcap is not None:
            scores = torch.tanh(scores / variant.softcap) * variant.softcap
        if variant.alibi_slopes is not None:
            distances = (tile.key_positions - tile.query_positions)[:, None, None]
            scores += variant.alibi_slopes.view(num_kv_heads, -1, 1) * distances
        scores += tile.bias
        new_maximum = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
        weights = torch.exp(scores - new_maximum)
        rescale = torch.exp(maximum - new_maximum)
        maximum = new_maximum
        total = total * rescale + weights.sum(dim=-1, keepdim=True)
        weighted = torch.bmm(weights.to(query.dtype).view(len(grouped), -1, weights.shape[-1]), values)
        out = out * rescale + weighted.view(out.shape).float()
    return (out / total).to(query.dtype).view(num_tokens, num_heads, value_dim)


def _initial_softmax_state(
    shape: tuple[int, int, int], sinks: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return maximum and total of the running softmax, ``[T, KVH, H // KVH, 1]``; a sink counts as a first key."""
    if sinks is None:
        return torch.full((*shape, 1), _EMPTY_MAXIMUM, device=device), torch.zeros(*shape, 1, device=device)
    return sinks.float().view(1, *shape[1:], 1).expand(*shape, 1), torch.ones(*shape, 1, device=device)


def _plan(
    batch: PagedBatch, window: int | None, mask_rule: MaskRule | None, num_kv_heads: int
) -> list[tuple[KeyTile, Tensor]]:
    tiles = batch.derived(("invariant", window, mask_rule), lambda: _key_tiles(batch, window, mask_rule))
    return batch.derived(
        ("invariant", window, mask_rule, num_kv_heads),
        lambda: [(tile, tile.cache_rows(num_kv_heads)) for tile in tiles],
    )


def _key_tiles(batch: PagedBatch, window: int | None, mask_rule: MaskRule | None) -> list[KeyTile]:
    """Return the tiles for the token that sees the most keys."""
    device = batch.device
    row, position = batch.rows_and_positions()
    # Each token reads its keys [start, stop).
    start = torch.zeros_like(position)
    if mask_rule is not None:
        stop = torch.tensor(batch.seq_lens)[row]
    else:
        stop = batch.token_ends(row, position)
        if window is not None:
            start = (position + 1 - window).clamp(min=0)
    first_tile = start // _TILE_LEN
    num_tiles = int((-(-stop // _TILE_LEN) - first_tile).max())
    row, position, start, stop, first_tile = (t.to(device)[:, None] for t in (row, position, start, stop, first_tile))
    table = batch.block_table[row[:, 0]]
    tiles = []
    for index in range(num_tiles):
        keys = (first_tile + index) * _TILE_LEN + torch.arange(_TILE_LEN, device=device)
        is_visible = (keys >= start) & (keys < stop)
        if mask_rule is not None:
            is_visible &= mask_rule(0, 0, position, torch.minimum(keys, stop - 1))
        keys = torch.where(is_visible, keys, position)
        slots = table.gather(1, keys // batch.block_size).long() * batch.block_size + keys % batch.block_size
        bias = torch.zeros(is_visible.shape, device=device).masked_fill_(~is_visible, float("-inf"))
        tiles.append(KeyTile(slots, bias[:, None, None], position, keys))
    return tiles
