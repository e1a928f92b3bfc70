"""The traceback that an engine core writes when it ends or hangs."""

from __future__ import annotations

import asyncio
import os

MAX_BYTES = 1 << 16
POLL_S = 0.02
# Several, because between two lines a core on a busy machine may wait for a processor.
NUM_UNCHANGED_POLLS = 5


class CoreTrace:
    """A file in memory that the core inherits. The core's fault handler writes to it even if the core hangs."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("penstock-trace")

    def read(self) -> str:
        """Return the text written so far; empty if the core wrote none."""
        text = os.pread(self.fd, MAX_BYTES, 0).decode(errors="replace")
        # Cut off the list of some hundred extension modules with which the fault handler ends.
        return text.partition("\nExtension modules:")[0].strip()

    async def settle(self, timeout_s: float) -> None:
        """Wait until text is written and does not grow any more, at most ``timeout_s``."""
        size = num_unchanged = 0
        for _ in range(round(timeout_s / POLL_S)):
            await asyncio.sleep(POLL_S)
            last_size, size = size, os.fstat(self.fd).st_size
            num_unchanged = num_unchanged + 1 if size == last_size > 0 else 0
            if num_unchanged == NUM_UNCHANGED_POLLS:
                return

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
