"""Memory of the C library's allocator."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def return_free_heap() -> None:
    """Return freed memory to the operating system; the allocator would keep it for later."""
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
