"""The traceback that an engine core leaves when it ends or hangs."""

from __future__ import annotations

import asyncio
import os

MAX_BYTES = 1 << 16
POLL_S = 0.02
# Between two lines a core of a busy machine may wait for its turn.
NUM_STILL_LOOKS = 5


class CoreTrace:
    """A file in memory that the core inherits; its fault handler can write there without the core's help."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("penstock-trace")

    def read(self) -> str:
        """What was written; empty after a silent end."""
        text = os.pread(self.fd, MAX_BYTES, 0).decode(errors="replace")
        # The fault handler ends with the names of some hundred extension modules.
        return text.partition("\nExtension modules:")[0].strip()

    async def settle(self, timeout_s: float) -> None:
        """Wait until something is written and no more is added, but no longer than ``timeout_s``."""
        size = num_still = 0
        for _ in range(round(timeout_s / POLL_S)):
            await asyncio.sleep(POLL_S)
            before, size = size, os.fstat(self.fd).st_size
            num_still = num_still + 1 if size == before > 0 else 0
            if num_still == NUM_STILL_LOOKS:
                return

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
