"""Reads blocks back into the KV cache, concurrently with the steps.

A load has reserved blocks that nothing else reads or writes until it has ended; then they get their hashes and are
found like any others. A thread reads one load after another, and ends a load at the first block that cannot be read. It
checks the time between blocks, so a slow disk does not delay requests for long.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field

import structlog

from ..scheduling.request import Request
from .device_blocks import DeviceBlocks
from .tiers import Tiers

# Limit on the time of a load. Afterwards no further block is read, and its requests no longer wait for a hanging read.
LOAD_TIMEOUT_S = 10.0
MAX_LOADS = 16

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Load:
    """Blocks to read.

    Args:
        hashes: hashes of the blocks, in order.
        blocks: a block of the KV cache for each hash.
        held: preceding cached blocks, which are held meanwhile.
        requests: requests that wait for the load.

    Attributes:
        num_loaded: how many blocks, from the first on, were read; valid once it ``has_ended``.
    """

    hashes: list[bytes]
    blocks: list[int]
    held: list[int]
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
        threading.Thread(target=self._run, name="kv-offload-read", daemon=True).start()

    def begin(self, load: Load) -> None:
        """Queue ``load`` for the thread."""
        self._loads.put(load)

    def wait(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until a load has ended since the last call."""
        self._progress.wait(timeout_s)
        self._progress.clear()

    def _run(self) -> None:
        while True:
            load = self._loads.get()
            try:
                self._read(load)
            except Exception:  # a driver may raise anything; the requests' tokens are computed instead
                log.exception("kv_offload_failed")
            load.has_ended = True
            self._progress.set()

    def _read(self, load: Load) -> None:
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
