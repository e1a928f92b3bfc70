"""Forwards of one or two sizes, so that the shapes in which a model computes do not follow the batch.

The packed tokens of a step are cut into tiles in order, across requests and within them. Tiles run one after the other,
so a later one finds the keys and values of the earlier ones in the cache. The last is filled up with copies of its last
token, whose slot is -1: they are stored nowhere, and nobody reads their result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.paged_attention import PagedBatch
from ..forward import ModelInput
from ..loader import LoadedModel
from ..to_device import to_device

IntArray = NDArray[np.int64]


@dataclass
class PackedTokens:
    """Any tokens of any requests, those of one request in order.

    Args:
        token_ids, positions, slot_mapping: ``[T]``.
        block_table: ``[B, MB]``.
        table_rows: ``[T]``, each token's row of ``block_table``.
        logit_rows: ``[R]`` ascending, the tokens whose logits are wanted.
        inputs_embeds: ``[T, hidden size]`` in place of the embeddings of ``token_ids``; None for those.
        token_lora: ``[T]``, as in ``ModelInput``.
        group_tables, group_slots: ``[G, B, MB]`` and ``[G, T]``, as in ``PagedBatch``.
    """

    token_ids: IntArray
    positions: IntArray
    slot_mapping: IntArray
    block_table: IntArray
    table_rows: IntArray
    logit_rows: IntArray
    inputs_embeds: Tensor | None = None
    token_lora: IntArray | None = None
    group_tables: IntArray | None = None
    group_slots: IntArray | None = None


def forward_in_tiles(model: LoadedModel, tokens: PackedTokens, tile_sizes: tuple[int, ...], block_size: int) -> Tensor:
    """Run ``tokens`` through the model in forwards of ``tile_sizes``, ascending; return logits ``[R, V]``."""
    tiles = _cut(len(tokens.token_ids), tile_sizes)
    return torch.cat([_forward_tile(model, tokens, start, size, block_size) for start, size in tiles])


def forward_at_once(model: LoadedModel, tokens: PackedTokens, block_size: int) -> Tensor:
    """Run ``tokens`` through the model in one forward, as they come; return logits ``[R, V]``.

    Tokens of a request that lie together are computed as such.
    """
    device = model.device
    starts = np.flatnonzero(np.diff(tokens.table_rows, prepend=-1))
    query_lens = np.diff(starts, append=len(tokens.token_ids))
    rows = tokens.table_rows[starts]
    batch = PagedBatch(
        block_table=to_device(tokens.block_table[rows], device),
        slot_mapping=to_device(tokens.slot_mapping, device),
        query_lens=query_lens.tolist(),
        seq_lens=(tokens.positions[starts + query_lens - 1] + 1).tolist(),
        block_size=block_size,
    )
    return model.forward.run(
        ModelInput(
            token_ids=to_device(tokens.token_ids, device),
            positions=to_device(tokens.positions, device),
            logit_rows=to_device(tokens.logit_rows, device),
            batch=batch,
            state_slots=rows,
        )
    )


def _cut(num_tokens: int, tile_sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Start and size of each tile: of the largest size, and of the smallest that holds what remains."""
    start = 0
    while start < num_tokens:
        size = next((size for size in tile_sizes if size >= num_tokens - start), tile_sizes[-1])
        yield start, size
        start += size


def _forward_tile(model: LoadedModel, tokens: PackedTokens, start: int, tile_size: int, block_size: int) -> Tensor:
    """Wanted logits of the tile that begins with token ``start``."""
    device = model.device
    stop = min(start + tile_size, len(tokens.token_ids))
    index = np.minimum(np.arange(start, start + tile_size), stop - 1)
    is_token = np.arange(tile_size) < stop - start
    seq_lens = tokens.positions[index] + 1
    num_blocks = -(-int(seq_lens.max()) // block_size)
    # Every token is a row of its own, a decode: to the model a request's second token of a tile is like any other.
    batch = PagedBatch(
        block_table=to_device(tokens.block_table[tokens.table_rows[index], :num_blocks], device),
        slot_mapping=to_device(np.where(is_token, tokens.slot_mapping[index], -1), device),
        query_lens=[1] * tile_size,
        seq_lens=seq_lens.tolist(),
        block_size=block_size,
    )
    if tokens.group_tables is not None and tokens.group_slots is not None:
        tables = tokens.group_tables[:, tokens.table_rows[index], :num_blocks]
        batch.group_tables = to_device(np.ascontiguousarray(tables), device)
        batch.group_slots = to_device(np.where(is_token, tokens.group_slots[:, index], -1), device)
    wanted = tokens.logit_rows[(tokens.logit_rows >= start) & (tokens.logit_rows < stop)] - start
    # The last layer, too, sees a whole tile; a tile that nobody wants logits of makes one row for nobody.
    logit_rows = np.arange(tile_size if len(wanted) else 1)
    step = ModelInput(
        token_ids=to_device(tokens.token_ids[index], device),
        positions=to_device(tokens.positions[index], device),
        logit_rows=to_device(logit_rows, device),
        batch=batch,
        state_slots=tokens.table_rows[index],
        inputs_embeds=None if tokens.inputs_embeds is None else tokens.inputs_embeds[to_device(index, device)],
        token_lora=None if tokens.token_lora is None else to_device(tokens.token_lora[index], device),
    )
    logits = model.forward.run(step)
    return logits[to_device(wanted, device)]
