"""The folder of file contents and working data of batches. All access runs in threads.

    incoming/FILE        an upload, until it is complete
    files/FILE           the contents of a file, complete and synced to disk: moved here by a rename
    work/BATCH/          a batch's input and its finished rows, see journal.py

Data to be deleted is listed as garbage in Redis, before it is written: so a process that dies at any point leaves
nothing forever. Several hosts share the folder on a shared file system.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
from collections.abc import AsyncIterable, AsyncIterator
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import msgspec

from ...shared.errors import ConfigurationError, PayloadTooLargeError, UnknownFileError, ValidationError
from ...shared.values.data_folder import data_folder
from ...shared.values.shown import shown

CHUNK_BYTES = 1024 * 1024


def files_folder(explicit: str | Path | None = None) -> Path:
    """Return the folder to use: ``explicit``, PENSTOCK_FILES_DIR, or "files" in the user's data folder.

    Raises:
        ConfigurationError: this user has no home.
    """
    chosen = explicit or os.environ.get("PENSTOCK_FILES_DIR")
    return Path(chosen).absolute() if chosen else data_folder() / "files"


class Received(msgspec.Struct, frozen=True):
    """Size and digest of a received file."""

    num_bytes: int
    sha256: str


class Contents:
    """Reads and writes the folder.

    Args:
        explicit: argument of ``files_folder``, resolved at first use, because a process that does not use the folder
            need not have one.
    """

    def __init__(self, explicit: str | Path | None) -> None:
        self._explicit = explicit

    @cached_property
    def folder(self) -> Path:
        """The folder.

        Raises: as ``files_folder``.
        """
        return files_folder(self._explicit)

    async def prepare(self) -> None:
        """Create the folder if it is missing, with access for this user only.

        Raises:
            ConfigurationError: it cannot be created or written to.
        """
        await asyncio.to_thread(self._make)

    async def exists(self) -> bool:
        """Return whether the folder exists."""
        return await asyncio.to_thread((self.folder / "files").is_dir)

    def path(self, file_id: str) -> Path:
        """Return the path of a file's contents."""
        return self.folder / "files" / file_id

    def work(self, batch_id: str) -> Path:
        """Return the working folder of a batch."""
        return self.folder / "work" / batch_id

    async def receive(self, file_id: str, chunks: AsyncIterable[bytes], max_bytes: int) -> Received:
        """Write ``chunks`` as they arrive, and move the complete file to its path.

        Raises:
            ValidationError: there were no bytes.
            PayloadTooLargeError: there were more than ``max_bytes``.
            ConfigurationError: as ``prepare``.
        """
        await self.prepare()
        incoming = self.folder / "incoming" / file_id
        num_bytes, digest = 0, hashlib.sha256()
        file = await asyncio.to_thread(incoming.open, "wb")
        try:
            async for chunk in chunks:
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise PayloadTooLargeError(f"file must have at most {max_bytes} bytes; split it into several")
                await asyncio.to_thread(_write_chunk, file, chunk, digest)
            if not num_bytes:
                raise ValidationError("file must not be empty, got 0 bytes")
            await asyncio.to_thread(put_in_place, file, self.path(file_id))
        except BaseException:
            await asyncio.to_thread(_discard, file, incoming)
            raise
        return Received(num_bytes, digest.hexdigest())

    async def rename(self, old_id: str, file_id: str) -> None:
        """Give the contents of a file another id. They replace contents that have it already."""
        await asyncio.to_thread(_rename, self.path(old_id), self.path(file_id))

    async def read(self, file_id: str, num_bytes: int) -> AsyncIterator[bytes]:
        """Iterate over the contents of a file.

        Raises:
            UnknownFileError: before the first chunk: they are missing, or not ``num_bytes`` long.
        """
        file = await asyncio.to_thread(self._open, file_id, num_bytes)
        try:
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield chunk
        finally:
            file.close()

    async def check(self, file_id: str, num_bytes: int) -> None:
        """Check that the contents of a file exist and are complete.

        Raises: as ``read``.
        """
        (await asyncio.to_thread(self._open, file_id, num_bytes)).close()

    async def clear(self, item_id: str) -> None:
        """Delete all data of a file or a batch, if there is any."""
        await asyncio.to_thread(self._clear, item_id)

    def _make(self) -> None:
        try:
            for name in ("incoming", "files", "work"):
                folder = self.folder / name
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if not os.access(folder, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise ConfigurationError(
                f"the folder {self.folder} for files cannot be used ({error.strerror}); name another with --files-dir"
            ) from error

    def _open(self, file_id: str, num_bytes: int) -> BinaryIO:
        try:
            file = self.path(file_id).open("rb")
        except FileNotFoundError:
            raise UnknownFileError(
                f"the contents of file {shown(file_id)} are not in {self.folder}; is it the folder that all hosts "
                "share?"
            ) from None
        size = os.fstat(file.fileno()).st_size
        if size != num_bytes:
            file.close()
            raise UnknownFileError(f"the contents of file {shown(file_id)} are damaged: {size} bytes of {num_bytes}")
        return file

    def _clear(self, item_id: str) -> None:
        for place in ("incoming", "files"):
            (self.folder / place / item_id).unlink(missing_ok=True)
        shutil.rmtree(self.work(item_id), ignore_errors=True)


async def read_local(path: Path) -> AsyncIterator[bytes]:
    """Iterate over the chunks of a local file."""
    file = await asyncio.to_thread(path.open, "rb")
    try:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk
    finally:
        file.close()


def put_in_place(file: BinaryIO, path: Path) -> None:
    """Sync ``file`` to disk, close it, and rename it to ``path``, where it is complete or missing."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    _rename(Path(file.name), path)


def _rename(old: Path, path: Path) -> None:
    os.rename(old, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write_chunk(file: BinaryIO, chunk: bytes, digest: hashlib._Hash) -> None:
    file.write(chunk)
    digest.update(chunk)


def _discard(file: BinaryIO, path: Path) -> None:
    file.close()
    path.unlink(missing_ok=True)
