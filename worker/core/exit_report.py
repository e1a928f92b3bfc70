"""The file to which a core writes why it ends, for its worker process to read.

It holds tracebacks, and messages of threads about the cause. A process has one, which is also the file of Python's
fault handler.
"""

from __future__ import annotations

import faulthandler
import os
import signal

_fd: int | None = None


def write_to(fd: int | None) -> None:
    """Write to the file with this descriptor from now on; None discards."""
    global _fd
    _fd = fd
    handle_faults()
    if fd is not None:
        # Shows where a core hangs, because the handler needs no GIL.
        faulthandler.register(signal.SIGUSR1, fd)


def handle_faults() -> None:
    """Write a traceback on a fatal signal. Call it again after a library has replaced the handlers.

    xgrammar replaces them when it is imported. Disable first, because enabling an enabled handler changes nothing.
    """
    if _fd is not None:
        faulthandler.disable()
        faulthandler.enable(_fd)


def write(text: str) -> None:
    """Write ``text``. Its last line must be a sentence that states the cause."""
    if _fd is not None:
        os.write(_fd, text.encode())
