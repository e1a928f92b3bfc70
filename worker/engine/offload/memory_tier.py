"""KV blocks in the host's memory."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from .records import CorruptBlockError, Row, checksum


class MemoryTier:
    """At most ``max_bytes`` of blocks; the least recently used make room. Threads may call it at the same time.

    It takes memory only as it is filled. ``in`` takes no lock, and never waits.
    """

    def __init__(self, max_bytes: int, block_bytes: int) -> None:
        num_rows = max_bytes // block_bytes
        self._rows = np.empty((num_rows, block_bytes), np.uint8)
        self._free = list(range(num_rows - 1, -1, -1))
        # By hash, the least recently used first: the row, and the checksum of what was put there.
        self._places: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._block_bytes = block_bytes

    @property
    def num_bytes(self) -> int:
        """What blocks take now."""
        return len(self._places) * self._block_bytes

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._places

    def put(self, block_hash: bytes, row: Row) -> None:
        """Keep a copy of ``row``; does nothing with one that is here."""
        with self._lock:
            if block_hash in self._places:
                self._places.move_to_end(block_hash)
                return
            place = self._free.pop() if self._free else self._places.popitem(last=False)[1][0]
            self._rows[place] = row
            self._places[block_hash] = place, checksum(row)

    def read(self, block_hash: bytes, out: Row) -> bool:
        """Copy a block to ``out``; False if it is not here.

        Raises:
            CorruptBlockError: its bytes have changed; it is here no longer.
        """
        with self._lock:
            found = self._places.get(block_hash)
            if found is None:
                return False
            self._places.move_to_end(block_hash)
            out[:] = self._rows[found[0]]
            if checksum(out) != found[1]:
                del self._places[block_hash]
                self._free.append(found[0])
                raise CorruptBlockError("its checksum is of other bytes")
        return True

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._free += [place for place, _ in self._places.values()]
            self._places.clear()
