"""Copies full blocks out of the KV cache, concurrently with the steps.

The engine's loop queues blocks that have become full, and a thread copies them later. A block may be reallocated
meanwhile: the thread checks for that afterwards, and discards such a copy. So neither a step nor the block pool ever
waits for a copy.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple

import structlog

from ..scheduling.blocks.block_pool import BlockPool
from .device_blocks import DeviceBlocks
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
        threading.Thread(target=self._run, name="kv-offload-write", daemon=True).start()

    def enqueue(self, block: int, block_hash: bytes) -> None:
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

    def _run(self) -> None:
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
