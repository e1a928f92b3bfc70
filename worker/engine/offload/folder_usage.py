"""Total bytes of all engines in a folder: a number in a file, protected by a lock of the host's kernel."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_NUMBER_BYTES = 8


@dataclass
class Usage:
    """The number while the lock is held; its last value is written when the lock is released."""

    num_bytes: int


class FolderUsage:
    """Lets one engine at a time change the number. The kernel releases the lock of an engine that dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last_seen_bytes = 0

    @contextmanager
    def changing(self) -> Iterator[Usage]:
        """Hold the lock while the number is changed.

        Raises:
            OSError: the file cannot be opened or written.
        """
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            usage = Usage(int.from_bytes(os.pread(descriptor, _NUMBER_BYTES, 0), "little"))
            try:
                yield usage
            finally:
                usage.num_bytes = max(0, usage.num_bytes)
                self.last_seen_bytes = usage.num_bytes
                os.pwrite(descriptor, usage.num_bytes.to_bytes(_NUMBER_BYTES, "little"), 0)
        finally:
            os.close(descriptor)
