"""KV blocks in a folder, one file each. They outlive the process, and several engines of a host share them.

A file's name consists of the engine's identity and the block's hash, so its contents never change, and an engine reads
files of any other. Engines wait for each other only while they update the total size (``FolderUsage``). A file is
written under a temporary name and renamed, so it exists completely or not at all. Nothing is synced to the disk: a file
torn by a crash of the host has a wrong checksum.

A header identifies and verifies the block. The checksum is CRC-32, which detects any flipped byte and takes a third of
the time of SHA-256. It protects against disk errors and torn writes. Everyone with write access to the folder is
trusted, as with the model's files.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# Bytes of a block: its parts in the caches of all layers, concatenated.
Row = NDArray[np.uint8]

_MAGIC = b"penstkv\x01"  # the last byte is the header's version
# Magic, identity, hash of the block, number of bytes that follow, their checksum.
_HEADER = struct.Struct("<8s32s32sQI")
HEADER_BYTES = _HEADER.size


class CorruptBlockError(Exception):
    """A block that was read differs from the block that was written; the message says how."""


def checksum(row: Row) -> int:
    """Return the CRC-32 of a block."""
    return zlib.crc32(row.data)


def make_header(identity: bytes, block_hash: bytes, row: Row) -> bytes:
    """Return the header of ``row`` in a file."""
    return _HEADER.pack(_MAGIC, identity, block_hash, row.nbytes, checksum(row))


def check_record(header: bytes, identity: bytes, block_hash: bytes, row: Row) -> None:
    """Verify that ``row``, read after ``header``, is the block ``block_hash`` of ``identity``.

    Raises:
        CorruptBlockError: it is not.
    """
    if len(header) < HEADER_BYTES:
        raise CorruptBlockError("the file ends within its header")
    magic, stored_identity, stored_hash, num_bytes, stored_checksum = _HEADER.unpack(header)
    if magic != _MAGIC or stored_identity != identity or stored_hash != block_hash or num_bytes != row.nbytes:
        raise CorruptBlockError("the header belongs to another block")
    if stored_checksum != checksum(row):
        raise CorruptBlockError("checksum mismatch")


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
