"""The folder of file contents and of what batches work with. All of it runs beside the event loop.

    incoming/FILE        an upload, until all of it is there
    files/FILE           the contents of a file, complete and on the disk: they come here by a rename
    work/BATCH/          a batch's input and the rows it has done, see journal.py

What this folder should not hold any more stands in the list of garbage in Redis, from before it is written: a process
that dies at any point leaves nothing behind for ever. Several hosts share the folder by a shared file system.
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

from ...shared.embedded.folder import data_folder
from ...shared.errors import ConfigurationError, PayloadTooLargeError, UnknownFileError, ValidationError
from ...shared.shown import shown

CHUNK_BYTES = 1024 * 1024


def files_folder(explicit: str | Path | None = None) -> Path:
    """Return the folder to use: ``explicit``, PENSTOCK_FILES_DIR, or "files" in the user's data folder.

    Raises:
        ConfigurationError: this user has no home.
    """
    chosen = explicit or os.environ.get("PENSTOCK_FILES_DIR")
    return Path(chosen).absolute() if chosen else data_folder() / "files"


class Received(msgspec.Struct, frozen=True):
    """How much was received, and its digest."""

    num_bytes: int
    sha256: str


class Contents:
    """Reads and writes the folder.

    Args:
        explicit: as ``files_folder`` takes it, when it is used first: who has no use for it need not have one.
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
        """Make the folder where it is missing, for this user alone.

        Raises:
            ConfigurationError: it cannot be made or written to.
        """
        await asyncio.to_thread(self._make)

    async def exists(self) -> bool:
        """Whether there is such a folder."""
        return await asyncio.to_thread((self.folder / "files").is_dir)

    def path(self, file_id: str) -> Path:
        """Where the contents of a file are."""
        return self.folder / "files" / file_id

    def work(self, batch_id: str) -> Path:
        """The working folder of a batch."""
        return self.folder / "work" / batch_id

    async def receive(self, file_id: str, chunks: AsyncIterable[bytes], max_bytes: int) -> Received:
        """Write ``chunks`` as they come, and put the whole in its place.

        Raises:
            ValidationError: nothing came.
            PayloadTooLargeError: more than ``max_bytes`` came.
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
                await asyncio.to_thread(_write, file, chunk, digest)
            if not num_bytes:
                raise ValidationError("file must not be empty, got 0 bytes")
            await asyncio.to_thread(put_in_place, file, self.path(file_id))
        except BaseException:
            await asyncio.to_thread(_drop, file, incoming)
            raise
        return Received(num_bytes, digest.hexdigest())

    async def read(self, file_id: str, num_bytes: int) -> AsyncIterator[bytes]:
        """Iterate over the contents of a file.

        Raises:
            UnknownFileError: they are not there, or not ``num_bytes`` long: before the first chunk.
        """
        file = await asyncio.to_thread(self._open, file_id, num_bytes)
        try:
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield chunk
        finally:
            file.close()

    async def check(self, file_id: str, num_bytes: int) -> None:
        """Check that the contents of a file are there.

        Raises: as ``read``.
        """
        (await asyncio.to_thread(self._open, file_id, num_bytes)).close()

    async def clear(self, item_id: str) -> None:
        """Remove whatever is here of a file or a batch; nothing is no error."""
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
        found = os.fstat(file.fileno()).st_size
        if found != num_bytes:
            file.close()
            raise UnknownFileError(f"the contents of file {shown(file_id)} are damaged: {found} bytes of {num_bytes}")
        return file

    def _clear(self, item_id: str) -> None:
        for place in ("incoming", "files"):
            (self.folder / place / item_id).unlink(missing_ok=True)
        shutil.rmtree(self.work(item_id), ignore_errors=True)


async def read_local(path: Path) -> AsyncIterator[bytes]:
    """Iterate over a file of the caller's own."""
    file = await asyncio.to_thread(path.open, "rb")
    try:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk
    finally:
        file.close()


def put_in_place(file: BinaryIO, path: Path) -> None:
    """Close ``file`` with all of it on the disk and rename it to ``path``: there it is whole, or not at all."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.rename(file.name, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(file: BinaryIO, chunk: bytes, digest: hashlib._Hash) -> None:
    file.write(chunk)
    digest.update(chunk)


def _drop(file: BinaryIO, path: Path) -> None:
    file.close()
    path.unlink(missing_ok=True)
