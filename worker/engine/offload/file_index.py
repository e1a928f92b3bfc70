"""Index of the block files in a folder, the least recently used first."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

SUFFIX = ".kv"
_TEMPORARY = ".tmp"
# Limit on the age of a file that is being written; an older one was left by a process that died.
_TEMPORARY_LIFE_S = 60.0
# Resolution of a folder's modification time.
_CLOCK_TICK_S = 1.0


def file_name(identity: bytes, block_hash: bytes) -> str:
    """Return a block's path in the folder. Engines with different identities use separate subfolders."""
    name = block_hash.hex()
    return f"{identity.hex()}/{name[:2]}/{name}{SUFFIX}"


def temporary_name(name: str) -> str:
    """Return the path of a file until it is complete. Random, because engines in containers may share process ids."""
    return f"{name}.{secrets.token_hex(8)}{_TEMPORARY}"


class FileIndex:
    """Time of last use (ns, the file's modification time) by name of each file.

    Safe for several threads. ``in`` takes no lock, and never waits.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._used_ns: OrderedDict[str, int] = OrderedDict()
        self._scanned: dict[str, float] = {}
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._used_ns

    def note_use(self, name: str, used_ns: int | None = None) -> None:
        """Record that file ``name`` exists and was used at ``used_ns``, now by default."""
        with self._lock:
            self._used_ns[name] = time.time_ns() if used_ns is None else used_ns
            self._used_ns.move_to_end(name)

    def discard(self, name: str) -> None:
        """Record that file ``name`` does not exist."""
        with self._lock:
            self._used_ns.pop(name, None)

    def names(self) -> list[str]:
        """Return all known names."""
        with self._lock:
            return list(self._used_ns)

    def least_recently_used(self) -> Iterator[tuple[str, int]]:
        """Yield the least recently used name and its time, repeatedly until the name is discarded or used."""
        while True:
            with self._lock:
                if not self._used_ns:
                    return
                first = next(iter(self._used_ns.items()))
            yield first

    def read_all(self) -> int:
        """Read the whole folder again, and remove files of dead writers; return the bytes of all blocks.

        Raises:
            OSError: the folder cannot be read.
        """
        files: list[tuple[int, str]] = []
        num_bytes = 0
        for parent in _subfolders(self._folder):
            for leaf in _subfolders(parent):
                for name, size, used_ns in _block_files(leaf):
                    num_bytes += size
                    files.append((used_ns, f"{parent.name}/{leaf.name}/{name}"))
        with self._lock:
            self._used_ns = OrderedDict((name, used_ns) for used_ns, name in sorted(files))
        return num_bytes

    def read_new(self, identity: bytes) -> None:
        """Find blocks that other engines of ``identity`` have written since; read only changed subfolders.

        Raises:
            OSError: the folder cannot be read.
        """
        parent = self._folder / identity.hex()
        if not parent.is_dir():
            return
        for leaf in _subfolders(parent):
            began_s = time.time()
            changed_s = leaf.stat().st_mtime
            if self._scanned.get(leaf.name) == changed_s:
                continue
            for name, _, used_ns in _block_files(leaf):
                path = f"{parent.name}/{leaf.name}/{name}"
                if path not in self._used_ns:
                    self.note_use(path, used_ns)
            if changed_s < began_s - _CLOCK_TICK_S:
                self._scanned[leaf.name] = changed_s


def _subfolders(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]


def _block_files(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Yield name, bytes and modification time of each block in ``folder``."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    stat = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(SUFFIX):
                        yield entry.name, stat.st_size, stat.st_mtime_ns
                    elif entry.name.endswith(_TEMPORARY) and stat.st_mtime < time.time() - _TEMPORARY_LIFE_S:
                        os.unlink(entry.path)
                except FileNotFoundError:  # another engine has removed it
                    continue
    except FileNotFoundError:
        return
