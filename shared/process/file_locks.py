"""Locks of whole files, which the kernel drops when their process ends. Windows has none of them."""

from __future__ import annotations

from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:
    fcntl = None

HAS_LOCKS = fcntl is not None


def lock(file: IO[bytes], *, is_shared: bool = False) -> None:
    """Wait for the lock of ``file`` and hold it until the file is closed."""
    assert fcntl is not None
    fcntl.flock(file, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)


def is_locked(path: Path) -> bool:
    """Whether a live process holds the lock of the file, shared or not."""
    assert fcntl is not None
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
