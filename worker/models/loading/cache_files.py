"""Files in a folder of the cache."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def replace_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Replace the file ``path`` by one with the content ``parts``, in one step. Its folder must exist.

    The content is not synced, which takes seconds for large files: who reads a file checks it.

    Raises:
        OSError: the content cannot be written. The file is as before.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            for part in parts:
                file.write(part)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def newest_first(folder: Path, suffix: str) -> list[Path]:
    """Return the files with this suffix, the last written or touched one first."""
    return sorted(folder.glob(f"*{suffix}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
