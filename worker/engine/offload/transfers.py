"""Threads that copy blocks out of the KV cache and back, concurrently with the steps.

``WriteBehind``: the engine's loop queues blocks that have become full, and a thread copies them later. A block may be
reallocated meanwhile: the thread checks for that afterwards, and discards such a copy. So neither a step nor the block
pool ever waits for a copy.

``Loader``: a load has reserved blocks that nothing else reads or writes until it has ended; then they get their hashes
and are found like any others. A thread reads one load after another, and ends a load at the first block that cannot be
read. It checks the time between blocks, so a slow disk does not delay requests for long.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from ..scheduling.block_pool import BlockPool
from ..scheduling.prefix_cache import BlockHashCache
from ..scheduling.request import Request
from .blocks import DeviceBlocks
from .tiers import Tiers

# How often the idle thread searches for blocks that other engines have written.
LOOK_INTERVAL_S = 1.0

log = structlog.get_logger(__name__)


class _FullBlock(NamedTuple):
    block: int
    num_uses: int
    block_hash: bytes


class WriteBehind:
    """Owns the thread that stores blocks in ``tiers``. Only that thread uses ``device``."""

    def __init__(self, tiers: Tiers, device: DeviceBlocks, pool: BlockPool) -> None:
        self._tiers = tiers
        self._device = device
        self._pool = pool
        # A block is queued once each time that it is filled, so of more blocks than this some have been reallocated.
        self._max_queued = pool.num_blocks
        self._queue: deque[_FullBlock] = deque()
        self._has_blocks = threading.Event()
        # Held while blocks are copied and stored.
        self._working = threading.Lock()
        threading.Thread(target=self._keep_writing, name="kv-offload-write", daemon=True).start()

    def enqueue_block(self, block: int, block_hash: bytes) -> None:
        """Queue ``block``, which is full and does not change until it is allocated again."""
        if len(self._queue) >= self._max_queued:
            self._queue.popleft()
            self._tiers.counters.num_dropped_blocks += 1
        self._queue.append(_FullBlock(block, self._pool.num_uses_of(block), block_hash))
        self._has_blocks.set()

    def stop(self) -> None:
        """Clear the queue, and return when no block is being copied."""
        self._tiers.counters.num_dropped_blocks += len(self._queue)
        self._queue.clear()
        with self._working:
            pass

    def finish(self, timeout_s: float) -> None:
        """Return when all queued blocks are written, or after ``timeout_s``."""
        give_up_at = time.monotonic() + timeout_s
        while self._queue and time.monotonic() < give_up_at:
            time.sleep(0.005)
        if self._working.acquire(timeout=max(0.0, give_up_at - time.monotonic())):
            self._working.release()

    def _keep_writing(self) -> None:
        while True:
            has_blocks = self._has_blocks.wait(LOOK_INTERVAL_S)
            self._has_blocks.clear()
            try:
                with self._working:
                    if not has_blocks:
                        self._tiers.look_for_new()
                while self._queue:
                    with self._working:
                        self._write_some()
            except Exception:  # a driver may raise anything; the engine continues without these blocks
                log.exception("kv_offload_failed")
                self._queue.clear()

    def _write_some(self) -> None:
        """Copy and store the first blocks of the queue, as many as the device has rows."""
        rows, counters = self._device.rows, self._tiers.counters
        full: list[_FullBlock] = []
        while self._queue and len(full) < len(rows):
            item = self._queue.popleft()
            if self._pool.num_uses_of(item.block) != item.num_uses:
                counters.num_dropped_blocks += 1
            elif self._tiers.is_open and self._tiers.wants(item.block_hash):
                full.append(item)
        if not full:
            return
        self._device.read([item.block for item in full], rows)
        # The pool counts an allocation before anything is written into the block, so a changed count shows a bad copy.
        is_unchanged = [self._pool.num_uses_of(item.block) == item.num_uses for item in full]
        for item, row, unchanged in zip(full, rows, is_unchanged, strict=False):
            if unchanged:
                self._tiers.put(item.block_hash, row)
            else:
                counters.num_dropped_blocks += 1


class OffloadingPrefixCache(BlockHashCache):
    """A ``BlockHashCache`` that also queues each new findable block for writing."""

    def __init__(self, block_pool: BlockPool, write_behind: WriteBehind) -> None:
        super().__init__(block_pool)
        self._write_behind = write_behind

    def record_computed(self, request: Request, num_new_tokens: int) -> None:
        super().record_computed(request, num_new_tokens)
        first = (request.num_computed_tokens - num_new_tokens) // self._block_size
        end = request.num_computed_tokens // self._block_size
        for index in range(first, end):
            block = request.block_table[index]
            # Of two blocks with the same contents only one has the hash; one copy suffices.
            if self._pool.hash_of(block) is not None:
                self._write_behind.enqueue_block(block, request.block_hashes[index])


# Limit on the time of a load. Afterwards no further block is read, and its requests no longer wait for a hanging read.
LOAD_TIMEOUT_S = 10.0
MAX_LOADS = 16


@dataclass(eq=False)
class Load:
    """Blocks to read.

    Args:
        hashes: hashes of the blocks, in order.
        blocks: a block of the KV cache for each hash.
        prefix_blocks: preceding cached blocks, which are held meanwhile.
        requests: requests that wait for the load.

    Attributes:
        num_loaded: how many blocks, from the first on, were read; valid once it ``has_ended``.
    """

    hashes: list[bytes]
    blocks: list[int]
    prefix_blocks: list[int]
    requests: list[Request]
    num_steps_to_wait: int = 0
    num_loaded: int = 0
    has_ended: bool = False
    give_up_at_s: float = field(default_factory=lambda: time.monotonic() + LOAD_TIMEOUT_S)

    @property
    def is_overdue(self) -> bool:
        """Whether its requests no longer wait for it."""
        return time.monotonic() > self.give_up_at_s


class Loader:
    """Owns the thread that reads loads. Only that thread uses ``device``."""

    def __init__(self, tiers: Tiers, device: DeviceBlocks) -> None:
        self._tiers = tiers
        self._device = device
        self._loads: queue.SimpleQueue[Load] = queue.SimpleQueue()
        self._progress = threading.Event()
        threading.Thread(target=self._keep_loading, name="kv-offload-read", daemon=True).start()

    def begin(self, load: Load) -> None:
        """Queue ``load`` for the thread."""
        self._loads.put(load)

    def wait(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until a load has ended since the last call."""
        self._progress.wait(timeout_s)
        self._progress.clear()

    def _keep_loading(self) -> None:
        while True:
            load = self._loads.get()
            try:
                self._read_blocks(load)
            except Exception:  # a driver may raise anything; the requests' tokens are computed instead
                log.exception("kv_offload_failed")
            load.has_ended = True
            self._progress.set()

    def _read_blocks(self, load: Load) -> None:
        rows, num_read = self._device.rows, 0
        while num_read < len(load.blocks) and not load.is_overdue:
            hashes = load.hashes[num_read : num_read + len(rows)]
            count = 0
            while count < len(hashes) and not load.is_overdue and self._tiers.read(hashes[count], rows[count]):
                count += 1
            if count:
                self._device.write(rows[:count], load.blocks[num_read : num_read + count])
                self._tiers.counters.num_read_bytes += count * self._device.block_bytes
            num_read += count
            load.num_loaded = num_read
            if count < len(hashes):
                return
