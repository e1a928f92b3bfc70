"""Index tensors to gather the keys and values of requests for the reference, built once per step and not per layer.

Positions after a row's end refer to its own last token and get a score of minus infinity. So padding never reads
another request's data, and a NaN in a freed block cannot propagate (0 * NaN is NaN).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kv_cache.reference import dequantize_bytes
from .batch import MaskRule, PagedBatch

# A decode row joins a group if the longest row is at most twice as long, or if a separate group would save less than
# this many gathered tokens. An extra group costs about 40 us per layer, a gathered token of 3 x 64 bf16 about 0.05 us.
_MIN_TOKENS_SAVED_BY_SPLIT = 1024


@dataclass
class DecodeGroup:
    """Decode rows of similar length, padded to the longest.

    Args:
        rows: ``[N]`` indices among the decode rows; None for all of them, in order.
        slots: ``[N, S]`` cache slots of the tokens that a row sees, padded at the end.
        bias: ``[N, 1, 1, S]`` float32, 0 for visible tokens and minus infinity for others; None if all are visible.
        query_positions: ``[N, 1]``.
        key_positions: ``[N, S]``.
    """

    rows: Tensor | None
    slots: Tensor
    bias: Tensor | None
    query_positions: Tensor
    key_positions: Tensor

    def cache_rows(self, num_kv_heads: int) -> Tensor:
        """Return indices ``[N * KVH * S]`` into a cache as ``[NB * BS * KVH, D]``, so that one gather sorts by head."""
        heads = torch.arange(num_kv_heads, device=self.slots.device)[None, :, None]
        return (self.slots[:, None, :] * num_kv_heads + heads).view(-1)


@dataclass
class PrefillRow:
    """Row with several query tokens.

    Args:
        start, stop: its query tokens in the packed axis.
        slots: ``[S]`` cache slots of the tokens that any of its queries sees.
        allowed: ``[query_len, S]`` bool, the tokens that each query sees; None for a causal mask without earlier
            tokens.
        query_positions: ``[query_len, 1]``.
        key_positions: ``[S]``.
    """

    start: int
    stop: int
    slots: Tensor
    allowed: Tensor | None
    query_positions: Tensor
    key_positions: Tensor


def read_cache(cache_rows: Tensor, index: Tensor, dtype: torch.dtype, scale: float | Tensor) -> Tensor:
    """Return rows ``index`` of a cache ``[N, ..., D]`` in ``dtype``; values in eight bits are multiplied by their
    scale.
    """
    if cache_rows.dtype == dtype:
        return cache_rows.index_select(0, index)
    if isinstance(scale, Tensor):
        scales = scale.view(*cache_rows.shape[:-1], -1).index_select(0, index)
        return dequantize_bytes(cache_rows.index_select(0, index), scales).to(dtype)
    # Not every device can index float8, so index its bytes.
    quantized = cache_rows.view(torch.uint8).index_select(0, index).view(cache_rows.dtype)
    return (quantized.float() * scale).to(dtype)


def decode_groups(batch: PagedBatch, window: int | None, mask_rule: MaskRule | None) -> list[DecodeGroup]:
    """Split the decode rows of ``batch`` into groups of similar visible length."""
    lens = batch.seq_lens[: batch.num_decodes]
    visible = [min(n, window) for n in lens] if window is not None and mask_rule is None else lens
    order = sorted(range(len(lens)), key=lambda row: -visible[row])
    members: list[list[int]] = []
    for index, row in enumerate(order):
        longest = visible[members[-1][0]] if members else 0
        saved = (longest - visible[row]) * (len(order) - index)
        if not members or (2 * visible[row] < longest and saved >= _MIN_TOKENS_SAVED_BY_SPLIT):
            members.append([row])
        else:
            members[-1].append(row)
    if len(members) == 1:
        return [_decode_group(batch, None, lens, visible, mask_rule)]
    return [
        _decode_group(batch, rows, [lens[r] for r in rows], [visible[r] for r in rows], mask_rule) for rows in members
    ]


def prefill_rows(batch: PagedBatch, window: int | None, mask_rule: MaskRule | None) -> list[PrefillRow]:
    """Return the rows of ``batch`` with more than one query token."""
    rows = []
    start = batch.num_decodes
    for row in range(batch.num_decodes, len(batch.query_lens)):
        query_len, seq_len = batch.query_lens[row], batch.seq_lens[row]
        first_query = seq_len - query_len
        # A window longer than the row is the same as a causal mask, which is not materialized.
        reach = seq_len if window is None or mask_rule is not None else min(window, seq_len)
        first_key = max(0, first_query - reach + 1)
        keys = torch.arange(first_key, seq_len, device=batch.device)
        queries = torch.arange(first_query, seq_len, device=batch.device)[:, None]
        allowed = None
        if mask_rule is not None:
            allowed = mask_rule(0, 0, queries, keys[None]).expand(query_len, len(keys))
        elif batch.visible_ends is not None:
            ends = batch.visible_ends[start : start + query_len, None]
            allowed = (keys < ends) & (keys > queries - reach)
        elif reach < seq_len or first_query > 0:
            allowed = (keys <= queries) & (keys > queries - reach)
        slots = _slots(batch, batch.block_table[row], keys)
        rows.append(PrefillRow(start, start + query_len, slots, allowed, queries, keys))
        start += query_len
    return rows


def _decode_group(
    batch: PagedBatch, rows: list[int] | None, lens: list[int], visible: list[int], mask_rule: MaskRule | None
) -> DecodeGroup:
    device = batch.device
    index = None if rows is None else torch.tensor(rows, device=device)
    last = torch.tensor(lens, device=device)[:, None] - 1
    num_visible = torch.tensor(visible, device=device)[:, None]
    offsets = torch.arange(max(visible), device=device)
    positions = torch.minimum(last + 1 - num_visible + offsets, last)
    table = batch.block_table[: batch.num_decodes] if index is None else batch.block_table[index]
    slots = table.gather(1, positions // batch.block_size).long() * batch.block_size + positions % batch.block_size
    bias = None
    if mask_rule is not None or min(visible) != max(visible):
        is_visible = offsets < num_visible
        if mask_rule is not None:
            is_visible = is_visible & mask_rule(0, 0, last, positions)
        bias = torch.zeros(is_visible.shape, device=device).masked_fill_(~is_visible, float("-inf"))[:, None, None]
    return DecodeGroup(index, slots, bias, last, positions)


def _slots(batch: PagedBatch, table_row: Tensor, positions: Tensor) -> Tensor:
    """Return the cache slots of ``positions`` of the request with the blocks ``table_row``, ``[MB]``."""
    return table_row[positions // batch.block_size].long() * batch.block_size + positions % batch.block_size
