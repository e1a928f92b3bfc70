"""KV blocks in the host's memory."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from .records import CorruptBlockError, Row, checksum


class MemoryTier:
    """Blocks in memory, at most ``max_bytes``; the least recently used are replaced. Safe for several threads.

    It uses memory only as it is filled. ``in`` takes no lock, and never waits.
    """

    def __init__(self, max_bytes: int, block_bytes: int) -> None:
        num_rows = max_bytes // block_bytes
        self._rows = np.empty((num_rows, block_bytes), np.uint8)
        self._free = list(range(num_rows - 1, -1, -1))
        # Row and checksum by hash, the least recently used first.
        self._places: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._block_bytes = block_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return len(self._places) * self._block_bytes

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._places

    def put(self, block_hash: bytes, row: Row) -> None:
        """Store a copy of ``row``, unless the block is stored already."""
        with self._lock:
            if block_hash in self._places:
                self._places.move_to_end(block_hash)
                return
            place = self._free.pop() if self._free else self._places.popitem(last=False)[1][0]
            self._rows[place] = row
            self._places[block_hash] = place, checksum(row)

    def read(self, block_hash: bytes, out: Row) -> bool:
        """Copy a block to ``out``; return False if it is not stored.

        Raises:
            CorruptBlockError: its bytes have changed; it has been removed.
        """
        with self._lock:
            if block_hash not in self._places:
                return False
            row, expected = self._places[block_hash]
            self._places.move_to_end(block_hash)
            out[:] = self._rows[row]
            if checksum(out) != expected:
                del self._places[block_hash]
                self._free.append(row)
                raise CorruptBlockError("checksum mismatch")
        return True

    def clear(self) -> None:
        """Forget all blocks."""
        with self._lock:
            self._free += [place for place, _ in self._places.values()]
            self._places.clear()
