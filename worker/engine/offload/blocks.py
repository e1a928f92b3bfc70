"""Bytes of KV blocks: on the device, and in a file.

On the device they are the parts of a block in all layers, concatenated, in each cache's layout. In a file a header
identifies and verifies the block. The checksum is CRC-32, which detects any flipped byte and takes a third of the time
of SHA-256. It protects against disk errors and torn writes. Everyone with write access to the folder is trusted, as
with the model's files.
"""

from __future__ import annotations

import struct
import zlib
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


# Bytes of a block: its parts in the caches of all layers, concatenated.
Row = NDArray[np.uint8]

_MAGIC = b"penstkv\x01"  # the last byte is the header's version
# Magic, identity, hash of the block, number of bytes that follow, their checksum.
_HEADER = struct.Struct("<8s32s32sQI")
HEADER_BYTES = _HEADER.size


class CorruptBlockError(Exception):
    """A block that was read differs from the block that was written; the message says how."""


def checksum(row: Row) -> int:
    """Return the CRC-32 of a block."""
    return zlib.crc32(row.data)


def make_header(identity: bytes, block_hash: bytes, row: Row) -> bytes:
    """Return the header of ``row`` in a file."""
    return _HEADER.pack(_MAGIC, identity, block_hash, row.nbytes, checksum(row))


def check_record(header: bytes, identity: bytes, block_hash: bytes, row: Row) -> None:
    """Verify that ``row``, read after ``header``, is the block ``block_hash`` of ``identity``.

    Raises:
        CorruptBlockError: it is not.
    """
    if len(header) < HEADER_BYTES:
        raise CorruptBlockError("the file ends within its header")
    magic, stored_identity, stored_hash, num_bytes, stored_checksum = _HEADER.unpack(header)
    if magic != _MAGIC or stored_identity != identity or stored_hash != block_hash or num_bytes != row.nbytes:
        raise CorruptBlockError("the header belongs to another block")
    if stored_checksum != checksum(row):
        raise CorruptBlockError("checksum mismatch")
