"""Where a core writes why it ends, for its worker process to read: its tracebacks, and what threads know of it.

One for each process, as the fault handler's file is, which it is.
"""

from __future__ import annotations

import faulthandler
import os
import signal

_fd: int | None = None


def keep_in(fd: int | None) -> None:
    """Write to the file with that descriptor from now on; None writes nowhere."""
    global _fd
    _fd = fd
    handle_faults()
    if fd is not None:
        # Says where a core hangs: the handler needs no GIL.
        faulthandler.register(signal.SIGUSR1, fd)


def handle_faults() -> None:
    """Have the traceback written that a fatal signal leaves; again after a library has put its handler in our place.

    xgrammar's does when it is imported. One that is enabled already would keep the handlers as they are.
    """
    if _fd is not None:
        faulthandler.disable()
        faulthandler.enable(_fd)


def write(text: str) -> None:
    """Write ``text``, whose last line says it in a sentence."""
    if _fd is not None:
        os.write(_fd, text.encode())
