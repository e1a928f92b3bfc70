"""KV blocks in a folder, one file each. They outlive the process, and several engines of a host share them.

A file's name consists of the engine's identity and the block's hash, so its contents never change, and an engine reads
files of any other. Engines wait for each other only while they update the total size (``folder_usage.py``). A file is
written under a temporary name and renamed, so it exists completely or not at all. Nothing is synced to the disk: a file
torn by a crash of the host has a wrong checksum.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from .file_index import FileIndex, file_name, temporary_name
from .folder_usage import FolderUsage, Usage
from .records import HEADER_BYTES, CorruptBlockError, Row, check_record, make_header

_USAGE_FILE = "usage"
_BLOCKS_FOLDER = "blocks"
# Shortest time between two reads of the whole folder, which find the oldest files of all engines.
REREAD_S = 60.0


class FolderTier:
    """Block files of all engines together, at most ``max_bytes``; the least recently used are removed.

    ``in`` reads the index only and never waits. One thread writes and one reads. All other methods raise ``OSError`` if
    the folder cannot be used.

    Args:
        folder: created when first needed.
    """

    def __init__(self, folder: Path, max_bytes: int, block_bytes: int) -> None:
        self._folder = folder / _BLOCKS_FOLDER
        self._max_bytes = max_bytes
        self._file_bytes = HEADER_BYTES + block_bytes
        self._usage = FolderUsage(folder / _USAGE_FILE)
        self._index = FileIndex(self._folder)
        self._identity: bytes | None = None
        self._read_all_at_s = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of all engines' blocks, as of this engine's last access."""
        return self._usage.last_seen_bytes

    def use(self, identity: bytes) -> None:
        """Use blocks of ``identity`` from now on, and index the folder."""
        self._identity = identity
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._usage.changing() as usage:
            usage.num_bytes = self._read_all()

    def __contains__(self, block_hash: bytes) -> bool:
        return self._identity is not None and file_name(self._identity, block_hash) in self._index

    def look_for_new(self) -> None:
        """Index blocks that other engines have written."""
        if self._identity is not None:
            self._index.read_new(self._identity)

    def write(self, block_hash: bytes, row: Row) -> bool:
        """Store a block; return False if it exists already, or does not fit."""
        assert self._identity is not None
        name = file_name(self._identity, block_hash)
        path = self._folder / name
        with self._usage.changing() as usage:
            if path.exists():
                self._index.note_use(name)
                return False
            if not self._make_room(usage):
                return False
            usage.num_bytes += self._file_bytes
        is_new = False
        try:
            is_new = self._write_file(name, make_header(self._identity, block_hash, row), row)
        finally:
            if not is_new:
                with self._usage.changing() as usage:
                    usage.num_bytes -= self._file_bytes
        self._index.note_use(name)
        return is_new

    def read(self, block_hash: bytes, out: Row) -> bool:
        """Read a block into ``out``; return False if it does not exist.

        Raises:
            CorruptBlockError: the file is damaged; it has been removed.
        """
        assert self._identity is not None
        name = file_name(self._identity, block_hash)
        try:
            with (self._folder / name).open("rb", buffering=0) as file:
                header = file.read(HEADER_BYTES) or b""
                num_bytes = file.readinto(out.data) or 0
                has_more = bool(file.read(1))
        except FileNotFoundError:  # another engine has removed it
            self._index.discard(name)
            return False
        try:
            if num_bytes < out.nbytes or has_more:
                raise CorruptBlockError(f"wrong size: {num_bytes}{' and more' * has_more} of {out.nbytes} bytes")
            check_record(header, self._identity, block_hash, out)
        except CorruptBlockError as error:
            self.discard(block_hash)
            raise CorruptBlockError(f"{self._folder / name}: {error}") from None
        with suppress(OSError):  # the folder may be read-only
            os.utime(self._folder / name)
        self._index.note_use(name)
        return True

    def discard(self, block_hash: bytes) -> None:
        """Remove a block from the index, and its file if possible."""
        assert self._identity is not None
        name = file_name(self._identity, block_hash)
        self._index.discard(name)
        with suppress(OSError), self._usage.changing() as usage:
            self._remove(name, usage)

    def clear(self) -> None:
        """Remove all blocks of this identity, including those of other engines."""
        if self._identity is None:
            return
        self._index.read_new(self._identity)
        prefix = self._identity.hex() + "/"
        with self._usage.changing() as usage:
            for name in [name for name in list(self._index.names()) if name.startswith(prefix)]:
                self._remove(name, usage)

    def _make_room(self, usage: Usage) -> bool:
        """Remove the least recently used files until another file fits; return False if it does not."""
        limit = self._max_bytes - self._file_bytes
        if usage.num_bytes > limit and time.monotonic() > self._read_all_at_s + REREAD_S:
            self._read_all()  # index files written and used by engines of other models
        self._remove_down_to(limit, usage)
        if usage.num_bytes > limit:
            self._read_all()
            self._remove_down_to(limit, usage)
        if usage.num_bytes > limit:
            # Nothing is left to remove, so the sum is wrong: engines died while they wrote.
            usage.num_bytes = self._read_all()
        return usage.num_bytes <= limit

    def _remove_down_to(self, limit: int, usage: Usage) -> None:
        """Remove the least recently used files in the index, until at most ``limit`` bytes are left."""
        for name, used_ns in self._index.least_recently_used():
            if usage.num_bytes <= limit:
                return
            try:
                last_used_ns = (self._folder / name).stat().st_mtime_ns
            except FileNotFoundError:
                self._index.discard(name)
                continue
            if last_used_ns > used_ns:
                self._index.note_use(name, last_used_ns)  # another engine has used it
            else:
                self._remove(name, usage)

    def _read_all(self) -> int:
        self._read_all_at_s = time.monotonic()
        return self._index.read_all()

    def _remove(self, name: str, usage: Usage) -> None:
        self._index.discard(name)
        path = self._folder / name
        try:
            num_bytes = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return
        usage.num_bytes -= num_bytes

    def _write_file(self, name: str, header: bytes, row: Row) -> bool:
        """Write a file; return False if another engine was first."""
        path, temporary = self._folder / name, self._folder / temporary_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(header)
                file.write(row.data)
            with self._usage.changing():
                if path.exists():
                    temporary.unlink()
                    return False
                temporary.rename(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        return True
