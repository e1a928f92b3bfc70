"""Copies full blocks out of the KV cache, beside the steps.

The engine's loop leaves notes of blocks that have become full; a thread copies them when it comes to it. Nothing keeps
a block from being taken meanwhile: the thread looks afterwards whether it was, and throws away what it has copied. So
neither a step nor the block pool ever waits for a copy.
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

# How often the thread looks, while it has nothing else to do, what other engines have written.
LOOK_INTERVAL_S = 1.0

log = structlog.get_logger(__name__)


class _Note(NamedTuple):
    block: int
    num_uses: int
    block_hash: bytes


class WriteBehind:
    """Owns the thread that puts blocks into ``tiers``. ``device`` is that thread's own."""

    def __init__(self, tiers: Tiers, device: DeviceBlocks, pool: BlockPool) -> None:
        self._tiers = tiers
        self._device = device
        self._pool = pool
        # A block is noted at most once for each time that it is filled, so more than there are would be gone anyhow.
        self._max_notes = pool.num_blocks
        self._notes: deque[_Note] = deque()
        self._has_notes = threading.Event()
        # Held while blocks are copied and put.
        self._working = threading.Lock()
        threading.Thread(target=self._run, name="kv-offload-write", daemon=True).start()

    def note(self, block: int, block_hash: bytes) -> None:
        """``block`` of the cache is full and will not change while it is somebody's, or is found by its hash."""
        if len(self._notes) >= self._max_notes:
            self._notes.popleft()
            self._tiers.counters.num_dropped_blocks += 1
        self._notes.append(_Note(block, self._pool.num_uses_of(block), block_hash))
        self._has_notes.set()

    def stop(self) -> None:
        """Forget what has been noted, and return when nothing is copied any more."""
        self._tiers.counters.num_dropped_blocks += len(self._notes)
        self._notes.clear()
        with self._working:
            pass

    def finish(self, timeout_s: float) -> None:
        """Return when all that has been noted is written, or after a while."""
        give_up_at = time.monotonic() + timeout_s
        while self._notes and time.monotonic() < give_up_at:
            time.sleep(0.005)
        if self._working.acquire(timeout=max(0.0, give_up_at - time.monotonic())):
            self._working.release()

    def _run(self) -> None:
        while True:
            has_notes = self._has_notes.wait(LOOK_INTERVAL_S)
            self._has_notes.clear()
            try:
                with self._working:
                    if not has_notes:
                        self._tiers.look_for_new()
                while self._notes:
                    with self._working:
                        self._write_some()
            except Exception:  # of a driver: the engine goes on without, and tells
                log.exception("kv_offload_failed")
                self._notes.clear()

    def _write_some(self) -> None:
        """Copy and put the blocks of the first notes, as many as there are rows."""
        rows, counters = self._device.rows, self._tiers.counters
        notes: list[_Note] = []
        while self._notes and len(notes) < len(rows):
            note = self._notes.popleft()
            if self._pool.num_uses_of(note.block) != note.num_uses:
                counters.num_dropped_blocks += 1
            elif self._tiers.is_open and self._tiers.wants(note.block_hash):
                notes.append(note)
        if not notes:
            return
        self._device.read([note.block for note in notes], rows)
        # Whoever has taken a block meanwhile was counted before anything was written into it.
        is_whole = [self._pool.num_uses_of(note.block) == note.num_uses for note in notes]
        for note, row, whole in zip(notes, rows, is_whole, strict=False):
            if whole:
                self._tiers.put(note.block_hash, row)
            else:
                counters.num_dropped_blocks += 1
