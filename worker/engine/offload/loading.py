"""Reads blocks back into the KV cache, beside the steps.

A load has blocks of its own, which nobody else reads or writes until it has ended; then they are named by their hashes
and found like any others. A thread reads one load after another and stops in the middle of one at the first block that
cannot be had. It looks at the clock between blocks, so a slow disk holds nobody up for long.
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

# From its beginning, after which no further block is read; a thread that hangs in a read is waited for no longer.
LOAD_TIMEOUT_S = 10.0
MAX_LOADS = 16

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Load:
    """Blocks that are read.

    Args:
        hashes: of the blocks that are wanted, in their order.
        blocks: of the KV cache, one for each.
        held: blocks in front of them, which have to stay meanwhile.
        requests: that wait for them.

    Attributes:
        num_loaded: of the first blocks, how many hold what they should; valid once it ``has_ended``.
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
        """Whether its requests wait no longer."""
        return time.monotonic() > self.give_up_at_s


class Loader:
    """Owns the thread that reads loads. ``device`` is that thread's own."""

    def __init__(self, tiers: Tiers, device: DeviceBlocks) -> None:
        self._tiers = tiers
        self._device = device
        self._loads: queue.SimpleQueue[Load] = queue.SimpleQueue()
        self._progress = threading.Event()
        threading.Thread(target=self._run, name="kv-offload-read", daemon=True).start()

    def begin(self, load: Load) -> None:
        """Read ``load`` when its turn comes."""
        self._loads.put(load)

    def wait(self, timeout_s: float) -> None:
        """Wait until a load has ended since the last call, at most ``timeout_s``."""
        self._progress.wait(timeout_s)
        self._progress.clear()

    def _run(self) -> None:
        while True:
            load = self._loads.get()
            try:
                self._read(load)
            except Exception:  # of a driver: the requests are computed
                log.exception("kv_offload_failed")
            load.has_ended = True
            self._progress.set()

    def _read(self, load: Load) -> None:
        rows, num_read = self._device.rows, 0
        while num_read < len(load.blocks) and not load.is_overdue:
            wanted = load.hashes[num_read : num_read + len(rows)]
            count = 0
            while count < len(wanted) and not load.is_overdue and self._tiers.read(wanted[count], rows[count]):
                count += 1
            if count:
                self._device.write(rows[:count], load.blocks[num_read : num_read + count])
                self._tiers.counters.num_read_bytes += count * self._device.block_bytes
            num_read += count
            load.num_loaded = num_read
            if count < len(wanted):
                return
