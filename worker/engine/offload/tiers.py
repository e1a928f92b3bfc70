"""Storage tiers of the KV offload: host memory first, then a folder; either may be missing."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from .folder_tier import CorruptBlockError, FolderTier, Row, checksum


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


# Time without writes after an error of the folder.
PAUSE_S = 30.0

log = structlog.get_logger(__name__)


@dataclass
class Counters:
    """Counters of ``KVOffloadStats``. One thread changes each number; only ``num_dropped_blocks`` has several."""

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_read_bytes: int = 0
    num_written_bytes: int = 0
    num_dropped_blocks: int = 0
    num_corrupt_blocks: int = 0


class Tiers:
    """Blocks by hash, of one identity at a time. No method raises: blocks that cannot be read are computed.

    Args:
        memory, folder: None if missing.
    """

    def __init__(self, memory: MemoryTier | None, folder: FolderTier | None) -> None:
        self._memory = memory
        self._folder = folder
        self._identity: bytes | None = None
        self._is_folder_open = False
        self._paused_until_s = 0.0
        self.counters = Counters()

    @property
    def is_open(self) -> bool:
        """Whether blocks can be stored and read, because their identity is known."""
        return self._identity is not None

    @property
    def num_memory_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.num_bytes

    @property
    def num_dir_bytes(self) -> int:
        return 0 if self._folder is None else self._folder.num_bytes

    def use(self, identity: bytes | None) -> None:
        """Use blocks of ``identity`` from now on; None if it is unknown. No thread may use the tiers meanwhile."""
        if identity == self._identity:
            return
        if self._memory is not None:
            self._memory.clear()
        self._identity = identity
        self._is_folder_open, self._paused_until_s = False, 0.0
        self._open_folder()

    def clear(self) -> None:
        """Forget all blocks of the identity."""
        if self._memory is not None:
            self._memory.clear()
        if self._folder is not None and self._is_folder_open:
            try:
                self._folder.clear()
            except OSError as error:
                self._tell_unusable(error)

    def find(self, hashes: Sequence[bytes]) -> int:
        """Return how many of ``hashes``, from the first on, are stored. Never waits."""
        if self._identity is None:
            return 0
        folder = self._folder if self._is_folder_open else None
        for count, block_hash in enumerate(hashes):
            in_memory = self._memory is not None and block_hash in self._memory
            if not in_memory and (folder is None or block_hash not in folder):
                return count
        return len(hashes)

    def wants(self, block_hash: bytes) -> bool:
        """Return whether a block should be stored, because a tier lacks it. Counts it as dropped if the folder that
        lacks it is unusable now.
        """
        if self._memory is not None and block_hash not in self._memory:
            return True
        if self._folder is None or block_hash in self._folder:
            return False
        if self._open_folder():
            return True
        self.counters.num_dropped_blocks += 1
        return False

    def put(self, block_hash: bytes, row: Row) -> None:
        """Store a block."""
        if self._memory is not None:
            self._memory.put(block_hash, row)
        if self._folder is None or self._write_to_folder(self._folder, block_hash, row):
            self.counters.num_written_bytes += row.nbytes
        else:
            self.counters.num_dropped_blocks += 1

    def _write_to_folder(self, folder: FolderTier, block_hash: bytes, row: Row) -> bool:
        """Write the block; return whether the folder has it afterwards."""
        if not self._open_folder():
            return False
        try:
            return folder.write(block_hash, row) or block_hash in folder
        except OSError as error:
            self._tell_unusable(error)
            return False

    def read(self, block_hash: bytes, out: Row) -> bool:
        """Read a block into ``out``; return False if it is missing, unreadable or damaged."""
        try:
            if self._memory is not None and self._memory.read(block_hash, out):
                return True
            if self._folder is None or not self._is_folder_open or not self._folder.read(block_hash, out):
                return False
        except CorruptBlockError as error:
            self.counters.num_corrupt_blocks += 1
            log.warning("kv_block_corrupt", block_hash=block_hash.hex(), reason=str(error))
            return False
        except OSError as error:
            self._folder.discard(block_hash)  # type: ignore[union-attr]  # only a folder raises that
            log.warning("kv_block_unreadable", block_hash=block_hash.hex(), reason=str(error))
            return False
        if self._memory is not None:
            self._memory.put(block_hash, out)
        return True

    def look_for_new(self) -> None:
        """Index blocks that other engines have written."""
        if self._folder is not None and self._is_folder_open:
            try:
                self._folder.look_for_new()
            except OSError as error:
                self._tell_unusable(error)

    def _open_folder(self) -> bool:
        """Open the folder, again after a pause; return whether it can be used."""
        if self._folder is None or self._identity is None or time.monotonic() < self._paused_until_s:
            return False
        if not self._is_folder_open:
            try:
                self._folder.use(self._identity)
                self._is_folder_open = True
            except OSError as error:
                self._tell_unusable(error)
        return self._is_folder_open

    def _tell_unusable(self, error: OSError) -> None:
        self._paused_until_s = time.monotonic() + PAUSE_S
        log.warning("kv_offload_dir_unusable", reason=str(error), pause_s=PAUSE_S)
