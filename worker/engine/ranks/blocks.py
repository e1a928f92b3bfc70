"""KV blocks of a rank: it copies its part of them between its caches and rows that all ranks share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch

from ...models.loaded import LoadedModel
from ..offload.blocks import DeviceBlocks, Rows, make_device_blocks
from .messages import BlockBytes, CopyBlocks, Done, MeasureBlock, ShareRows


class FollowingBlocks:
    """The blocks of a rank above 0."""

    def __init__(self, model: LoadedModel, device: torch.device, rank: int) -> None:
        self._model = model
        self._device = device
        self._rank = rank
        self._parts: list[tuple[DeviceBlocks, Rows]] = []

    def measure_part(self, _: MeasureBlock) -> BlockBytes:
        return BlockBytes(self._own_blocks().block_bytes)

    def share_rows(self, command: ShareRows) -> None:
        """Map the rows. Raises ``OSError`` if that is impossible."""
        begin = sum(command.part_bytes[: self._rank])
        columns = slice(begin, begin + command.part_bytes[self._rank])
        self._parts.append((self._own_blocks(), map_rows(command)[:, columns]))

    def copy_part(self, command: CopyBlocks) -> Done:
        """Copy between rows and caches, before the next step runs."""
        local, rows = self._parts[command.number]
        copy_rows(local, self._device, command.blocks, rows, command.into_cache)
        return Done()

    def _own_blocks(self) -> DeviceBlocks:
        return make_device_blocks(lambda: self._model.forward.caches, self._device)


def map_rows(shared: ShareRows) -> Rows:
    """Return the rows ``[num_rows, sum(part_bytes)]`` of all ranks. Raises ``OSError`` if this rank cannot map them."""
    descriptor = os.open(shared.path, os.O_RDWR)
    try:
        memory = mmap.mmap(descriptor, shared.num_rows * sum(shared.part_bytes))
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, np.uint8).reshape(shared.num_rows, -1)


def copy_rows(local: DeviceBlocks, device: torch.device, blocks: Sequence[int], rows: Rows, into_cache: bool) -> None:
    """Copy this rank's part of ``blocks`` to ``rows``, or with ``into_cache`` from them."""
    if device.type == "cuda":
        # A step returns before the GPU has computed it, and may still write to blocks that were freed since.
        torch.cuda.synchronize(device)
    if into_cache:
        local.write(rows, blocks)
    else:
        local.read(blocks, rows)
