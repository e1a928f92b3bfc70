"""Index tensors by which the reference collects a request's keys and values; made once per step, not per layer.

Positions past a row's end are pointed at its own last token and get a score of minus infinity: padding then never
reads another request's data, and a NaN left in a freed block cannot travel (0 * NaN is NaN).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import MaskRule, PagedBatch

# A decode row joins a group whose longest row is at most twice as long, or when splitting off would save less than
# this many gathered tokens: an extra group costs about 40us a layer, a gathered token of 3 x 64 bf16 about 0.05us.
_MIN_TOKENS_SAVED_BY_SPLIT = 1024


@dataclass
class DecodeGroup:
    """Decode rows of similar length, padded to the longest.

    Args:
        rows: ``[N]`` their places among the decode rows; None means all of them, in order.
        slots: ``[N, S]`` cache slots of the tokens a row sees, padded at the end.
        bias: ``[N, 1, 1, S]`` float32, 0 where visible and minus infinity elsewhere; None if all is visible.
        query_positions: ``[N, 1]``.
        key_positions: ``[N, S]``.
    """

    rows: Tensor | None
    slots: Tensor
    bias: Tensor | None
    query_positions: Tensor
    key_positions: Tensor

    def cache_rows(self, num_kv_heads: int) -> Tensor:
        """``[N * KVH * S]`` rows of a cache seen as ``[NB * BS * KVH, D]``, so that one gather sorts by head."""
        heads = torch.arange(num_kv_heads, device=self.slots.device)[None, :, None]
        return (self.slots[:, None, :] * num_kv_heads + heads).view(-1)


@dataclass
class PrefillRow:
    """One row with several query tokens.

    Args:
        start, stop: its query tokens in the packed axis.
        slots: ``[S]`` cache slots of the tokens that any of its queries sees.
        allowed: ``[query_len, S]`` bool, which query sees which token; None means causal with nothing before it.
        query_positions: ``[query_len, 1]``.
        key_positions: ``[S]``.
    """

    start: int
    stop: int
    slots: Tensor
    allowed: Tensor | None
    query_positions: Tensor
    key_positions: Tensor


def read_cache(cache_rows: Tensor, index: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Rows ``index`` of a cache ``[N, ...]`` as numbers of ``dtype``; a float8 counts for ``scale`` times itself."""
    if cache_rows.dtype == dtype:
        return cache_rows.index_select(0, index)
    # Not every device indexes float8; its bytes are as good.
    found = cache_rows.view(torch.uint8).index_select(0, index).view(cache_rows.dtype)
    return (found.float() * scale).to(dtype)


def decode_groups(batch: PagedBatch, window: int | None, mask_rule: MaskRule | None) -> list[DecodeGroup]:
    """Split the decode rows of ``batch`` into groups of similar visible length."""
    lens = batch.seq_lens[: batch.num_decodes]
    visible = [min(n, window) for n in lens] if window is not None and mask_rule is None else lens
    order = sorted(range(len(lens)), key=lambda row: -visible[row])
    members: list[list[int]] = []
    for place, row in enumerate(order):
        longest = visible[members[-1][0]] if members else 0
        saved = (longest - visible[row]) * (len(order) - place)
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
    """The rows of ``batch`` with more than one query token."""
    rows = []
    start = batch.num_decodes
    for row in range(batch.num_decodes, len(batch.query_lens)):
        query_len, seq_len = batch.query_lens[row], batch.seq_lens[row]
        first_query = seq_len - query_len
        # A window that no query fills is plain causality, which needs no mask.
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
        seen = offsets < num_visible
        if mask_rule is not None:
            seen = seen & mask_rule(0, 0, last, positions)
        bias = torch.zeros(seen.shape, device=device).masked_fill_(~seen, float("-inf"))[:, None, None]
    return DecodeGroup(index, slots, bias, last, positions)


def _slots(batch: PagedBatch, table_row: Tensor, positions: Tensor) -> Tensor:
    """Cache slots of ``positions`` of the request whose blocks are ``table_row``, ``[MB]``."""
    return table_row[positions // batch.block_size].long() * batch.block_size + positions % batch.block_size
