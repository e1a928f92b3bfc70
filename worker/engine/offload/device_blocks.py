"""Bytes of KV-cache blocks: the parts of a block in all layers, concatenated, in each cache's layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Bytes copied at a time; between two copies another thread may use the device.
_CHUNK_BYTES = 8 << 20
_MAX_CHUNK_BLOCKS = 64
Rows = NDArray[np.uint8]


class DeviceBlocks(Protocol):
    """Copies between blocks and rows of bytes. Only one thread at a time may call it."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def rows(self) -> Rows:
        """Buffer for some blocks, ``[N, block_bytes]``, in memory that the device accesses fast."""
        ...

    def read(self, blocks: Sequence[int], rows: Rows) -> None:
        """Copy ``blocks`` to as many ``rows``, and return when done. The steps that fill the blocks must have ended."""
        ...

    def write(self, rows: Rows, blocks: Sequence[int]) -> None:
        """Copy ``rows`` to ``blocks``, which no step may read, and return when done."""
        ...


def layout_of(caches: Sequence[Tensor]) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each part of a block."""
    return [(str(cache.dtype), tuple(cache.shape[1:])) for cache in caches]


def make_device_blocks(caches: Callable[[], list[Tensor]], device: torch.device) -> DeviceBlocks:
    """Return the ``DeviceBlocks`` of ``caches()``, ``[NB, ...]`` each, which may return new tensors later."""
    return (HostBlocks if device.type == "cpu" else GpuBlocks)(caches)


def _bytes_of(cache: Tensor) -> Tensor:
    """Return a view of a cache as ``[NB, bytes]``."""
    return cache.detach().flatten(1).view(torch.uint8)


def _num_rows(block_bytes: int) -> int:
    return max(1, min(_MAX_CHUNK_BLOCKS, _CHUNK_BYTES // block_bytes))


class HostBlocks:
    """Blocks in the host's memory."""

    def __init__(self, caches: Callable[[], list[Tensor]]) -> None:
        self._caches = caches
        self.block_bytes = sum(_bytes_of(cache).shape[1] for cache in caches())
        self.rows = np.empty((_num_rows(self.block_bytes), self.block_bytes), np.uint8)

    def read(self, blocks: Sequence[int], rows: Rows) -> None:
        """See ``DeviceBlocks``. numpy copies in this thread only, without the GIL; torch would use more threads."""
        index = np.asarray(blocks)
        for part, columns in self._parts():
            rows[: len(blocks), columns] = part[index]

    def write(self, rows: Rows, blocks: Sequence[int]) -> None:
        """See ``DeviceBlocks``."""
        index = np.asarray(blocks)
        for part, columns in self._parts():
            part[index] = rows[: len(blocks), columns]

    def _parts(self) -> list[tuple[Rows, slice]]:
        parts, end = [], 0
        for cache in self._caches():
            part = _bytes_of(cache).numpy()
            begin, end = end, end + part.shape[1]
            parts.append((part, slice(begin, end)))
        return parts


class GpuBlocks:
    """Blocks on a GPU, copied during its steps: in a separate stream, through pinned memory."""

    def __init__(self, caches: Callable[[], list[Tensor]]) -> None:
        self._caches = caches
        first = caches()[0]
        self.block_bytes = sum(_bytes_of(cache).shape[1] for cache in caches())
        self._stream = torch.cuda.Stream(first.device)
        shape = _num_rows(self.block_bytes), self.block_bytes
        self._pinned = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self._staged = torch.empty(shape, dtype=torch.uint8, device=first.device)
        self.rows = self._pinned.numpy()

    @torch.inference_mode()
    def read(self, blocks: Sequence[int], rows: Rows) -> None:
        """See ``DeviceBlocks``."""
        with torch.cuda.stream(self._stream):
            index = torch.tensor(blocks, device=self._staged.device)
            count, end = len(blocks), 0
            for cache in self._caches():
                part = _bytes_of(cache)
                begin, end = end, end + part.shape[1]
                self._staged[:count, begin:end] = part.index_select(0, index)
            torch.from_numpy(rows)[:count].copy_(self._staged[:count], non_blocking=True)
            self._stream.synchronize()

    @torch.inference_mode()
    def write(self, rows: Rows, blocks: Sequence[int]) -> None:
        """See ``DeviceBlocks``."""
        with torch.cuda.stream(self._stream):
            index = torch.tensor(blocks, device=self._staged.device)
            count, end = len(blocks), 0
            self._staged[:count].copy_(torch.from_numpy(rows)[:count], non_blocking=True)
            for cache in self._caches():
                part = _bytes_of(cache)
                begin, end = end, end + part.shape[1]
                part.index_copy_(0, index, self._staged[:count, begin:end])
            self._stream.synchronize()
