"""Where a core writes why it ends, for its worker process to read: its tracebacks, and what threads know of it.

One for each process, as the fault handler's file is, which it is.
"""

from __future__ import annotations

import os

_fd: int | None = None


def keep_in(fd: int | None) -> None:
    """Write to the file with that descriptor from now on; None writes nowhere."""
    global _fd
    _fd = fd


def write(text: str) -> None:
    """Write ``text``, whose last line says it in a sentence."""
    if _fd is not None:
        os.write(_fd, text.encode())
