"""The bytes of KV-cache blocks: all layers' parts of a block one after the other, in whatever layout they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# What is copied at a time, in between which another thread may have the device.
_CHUNK_BYTES = 8 << 20
_MAX_CHUNK_BLOCKS = 64
Rows = NDArray[np.uint8]


class DeviceBlocks(Protocol):
    """Copies between blocks and rows of bytes. Any one thread at a time may call it."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def rows(self) -> Rows:
        """Room for some blocks, ``[N, block_bytes]``, which the device reaches quickly."""
        ...

    def read(self, blocks: Sequence[int], rows: Rows) -> None:
        """Copy ``blocks``, whose steps have ended, to ``rows``, as many; done when it returns."""
        ...

    def write(self, rows: Rows, blocks: Sequence[int]) -> None:
        """Copy ``rows`` to ``blocks``, which no step reads; done when it returns."""
        ...


def layout_of(caches: Sequence[Tensor]) -> list[tuple[str, tuple[int, ...]]]:
    """What a block is: dtype and shape of each of its parts."""
    return [(str(cache.dtype), tuple(cache.shape[1:])) for cache in caches]


def make_device_blocks(caches: Callable[[], list[Tensor]], device: torch.device) -> DeviceBlocks:
    """Return what copies the blocks of ``caches``, ``[NB, ...]`` each, which may be others after a while."""
    return (HostBlocks if device.type == "cpu" else GpuBlocks)(caches)


def _bytes_of(cache: Tensor) -> Tensor:
    """A cache as ``[NB, bytes]``, the same memory."""
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
        """See ``DeviceBlocks``. numpy copies in this thread alone, and without the GIL; torch would ask others."""
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
    """Blocks on a GPU, copied beside its steps: by a stream of its own, through pinned memory."""

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
