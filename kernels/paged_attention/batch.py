"""Where the tokens of one packed forward lie in the paged cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..errors import KernelInputError

# rule(batch_index, head_index, query_positions, key_positions) -> bool tensor, as transformers' mask functions.
MaskRule = Callable[[int, int, Tensor, Tensor], Tensor]


class PagedBatch:
    """Built once per step, read by every layer.

    Row ``b`` is a request with ``query_lens[b]`` tokens in the packed axis; they are the last of its
    ``seq_lens[b]`` tokens. Rows with one query token come first (decodes), then the others (prefill chunks).

    Args:
        block_table: ``[B, MB]`` int32 or int64; entries past a row's last block are not read.
        slot_mapping: ``[T]``, the cache slot of each packed token.
        query_lens: tokens of each row in this forward, at least 1.
        seq_lens: tokens of each row that are in the cache once this forward has stored its own.
        block_size: tokens per block.

    Raises:
        KernelInputError: a decode row stands behind a prefill row.
    """

    def __init__(
        self, block_table: Tensor, slot_mapping: Tensor, query_lens: list[int], seq_lens: list[int], block_size: int
    ) -> None:
        self.block_table = block_table
        self.slot_mapping = slot_mapping
        self.query_lens = query_lens
        self.seq_lens = seq_lens
        self.block_size = block_size
        self.num_tokens = sum(query_lens)
        self.num_decodes = query_lens.count(1)
        if 1 in query_lens[self.num_decodes :]:
            raise KernelInputError(f"decode rows must come first, got query_lens {query_lens}")
        self._derived: dict[Hashable, Any] = {}

    @property
    def device(self) -> torch.device:
        """Where the index tensors live."""
        return self.block_table.device

    def derived(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """Return what ``build`` makes of this batch, made once and shared by all layers of the step."""
        value = self._derived.get(key)
        if value is None:
            value = self._derived[key] = build()
        return value
