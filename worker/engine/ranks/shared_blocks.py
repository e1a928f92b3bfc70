"""KV blocks over several ranks, for the offload.

The bytes of a block are the parts of all ranks, in the order of ranks. So a block is stored and read as a whole. Rows
of some blocks are in memory that all ranks share: each rank copies its own columns, by order of rank 0. Only rank 0
reads and writes files, so a slow disk delays no rank.

A rank runs orders and steps in the order in which they were sent. So it copies a block before a step writes into it
that was scheduled after the order, and after all steps that were sent before.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ..offload.blocks import DeviceBlocks, Rows, num_rows_of
from .blocks import copy_rows, map_rows
from .messages import BlockBytes, CopyBlocks, MeasureBlock, ShareRows
from .team import FILES_TIMEOUT_S, RankTeam


class SharedBlocks:
    """The ``DeviceBlocks`` of all ranks, as used by rank 0.

    Args:
        local: the part of this rank, on ``device``.
        number: how many the engine has made before.
    """

    def __init__(self, team: RankTeam, local: DeviceBlocks, device: torch.device, number: int) -> None:
        self._team = team
        self._local = local
        self._device = device
        self._number = number
        _, answers = team.together(MeasureBlock(), lambda: None)
        part_bytes = [local.block_bytes, *(each.num_bytes for each in answers if isinstance(each, BlockBytes))]
        self.block_bytes = sum(part_bytes)
        num_rows = num_rows_of(self.block_bytes)
        descriptor = os.memfd_create("penstock-blocks")
        try:
            os.ftruncate(descriptor, num_rows * self.block_bytes)
            shared = ShareRows(f"/proc/{os.getpid()}/fd/{descriptor}", num_rows, part_bytes)
            self.rows, _ = team.together(shared, lambda: map_rows(shared))
        finally:
            os.close(descriptor)

    def read(self, blocks: Sequence[int], rows: Rows) -> None:
        """See ``DeviceBlocks``; ``rows`` are the first of ``self.rows``."""
        self._copy_in_ranks(blocks, rows, into_cache=False)

    def write(self, rows: Rows, blocks: Sequence[int]) -> None:
        """See ``DeviceBlocks``; ``rows`` are the first of ``self.rows``."""
        self._copy_in_ranks(blocks, rows, into_cache=True)

    def _copy_in_ranks(self, blocks: Sequence[int], rows: Rows, *, into_cache: bool) -> None:
        # A rank answers after its current step, however long that takes.
        question = self._team.ask_ranks(CopyBlocks(self._number, list(blocks), into_cache), FILES_TIMEOUT_S)
        copy_rows(self._local, self._device, blocks, rows[:, : self._local.block_bytes], into_cache)
        self._team.gather(question)
