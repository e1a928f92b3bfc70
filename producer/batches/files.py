"""Manage files: records in Redis, contents in a folder. Has the Lua scripts of files and batches, and their lists."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ...shared.connection import CommandConnection
from ...shared.errors import UnknownFileError, ValidationError
from ...shared.keys import BatchKeys
from ...shared.redis_access.script import Script, load_scripts
from ...shared.values.checks import check_text
from ...shared.values.names import check_name
from ...shared.values.shown import shown
from .batch_records import MAX_EXPIRY_S, MAX_FILE_BYTES, PURPOSES, Deleted, FileObject, FileRecord, Page, check_expiry
from .contents import Contents

_NAMES = ("put_file", "delete_file", "create", "claim", "write", "close", "cancel")
MAX_LIMIT = 10_000
MAX_FILENAME_CHARS = 512
# Received contents that do not become a file within this time are garbage.
UPLOAD_TTL_S = 24 * 3600.0
_CLEAR_AT_ONCE = 100
_record_decoder = msgspec.json.Decoder(FileRecord)
SCRIPTS: dict[str, Script] = load_scripts(__name__.rpartition(".")[0], _NAMES)
T = TypeVar("T")
PAGE_READ_SIZE = 200


class Upload(msgspec.Struct, frozen=True):
    """Stored contents that are not a file yet."""

    file_id: str
    num_bytes: int
    sha256: str


def check_upload(purpose: str, filename: str, expires_after_s: int | None) -> None:
    """Check the fields of an upload.

    Raises:
        ValidationError: a field is invalid.
    """
    if purpose != "batch":
        raise ValidationError(f"purpose must be 'batch', the only supported one, got {shown(purpose)}")
    check_expiry("expires_after.seconds", expires_after_s)
    if not 1 <= len(filename) <= MAX_FILENAME_CHARS or not filename.isprintable():
        raise ValidationError(f"filename must be 1 to {MAX_FILENAME_CHARS} printable characters, got {shown(filename)}")


class Files:
    """Creates, lists, reads and deletes files. Files of other tenants are unknown.

    Args:
        max_file_bytes: limit of an upload.
    """

    def __init__(
        self,
        connection: CommandConnection,
        keys: BatchKeys,
        contents: Contents,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self.contents = contents
        self._max_file_bytes = max_file_bytes

    async def create(
        self,
        chunks: AsyncIterable[bytes],
        *,
        filename: str,
        tenant: str = "default",
        purpose: str = "batch",
        expires_after_s: int | None = None,
    ) -> FileObject:
        """Store ``chunks`` as they arrive. The file exists once it is complete on disk.

        Args:
            expires_after_s: 3600 to 2592000 (30 days, the default).

        Raises:
            ValidationError: a field is invalid, or the file is empty.
            PayloadTooLargeError: it has more than ``max_file_bytes``.
        """
        check_upload(purpose, filename, expires_after_s)
        check_name("tenant", tenant)
        upload = await self.receive(chunks)
        return await self.keep(
            upload, filename=filename, tenant=tenant, purpose=purpose, expires_after_s=expires_after_s
        )

    async def receive(self, chunks: AsyncIterable[bytes]) -> Upload:
        """Store contents that are not a file yet. ``keep`` makes them one; otherwise they are garbage after a day.

        Raises:
            ValidationError: there were no bytes.
            PayloadTooLargeError: there were more than ``max_file_bytes``.
        """
        file_id = f"file-{secrets.token_hex(16)}"
        await self.reserve(file_id)
        received = await self.contents.receive(file_id, chunks, self._max_file_bytes)
        return Upload(file_id, received.num_bytes, received.sha256)

    async def keep(
        self,
        upload: Upload,
        *,
        filename: str,
        tenant: str = "default",
        purpose: str = "batch",
        expires_after_s: int | None = None,
        file_id: str | None = None,
    ) -> FileObject:
        """Create a file from received contents.

        Args:
            file_id: idempotency key; a file with this id, which has the same contents, is returned unchanged.

        Raises:
            ValidationError: a field is invalid.
        """
        check_upload(purpose, filename, expires_after_s)
        check_name("tenant", tenant)
        if file_id is not None:
            upload = await self._renamed(upload, file_id)
        now = await self.time_s()
        file = FileObject(
            id=upload.file_id,
            bytes=upload.num_bytes,
            created_at=int(now),
            expires_at=int(now) + (expires_after_s or MAX_EXPIRY_S),
            filename=filename,
            purpose=purpose,
        )
        record = FileRecord(file=file, tenant=tenant, sha256=upload.sha256)
        keys = [self._keys.file(file.id), self._keys.files(tenant), self._keys.garbage]
        reply = await self._connection.run_script(SCRIPTS["put_file"], keys, file_args(record, now))
        return _record_decoder.decode(reply).file

    async def discard(self, upload: Upload) -> None:
        """Delete contents that will not become a file."""
        await self._clear(upload.file_id)

    async def reserve(self, file_id: str) -> None:
        """Register contents before they are written, so that they are cleared if they never become a file."""
        clear_ms = int((await self.time_s() + UPLOAD_TTL_S) * 1000)
        # GT, because a file of this id may exist, whose contents are cleared later.
        await self._connection.execute("ZADD", self._keys.garbage, "GT", clear_ms, file_id)

    async def record(self, file_id: str, *, tenant: str = "default") -> FileRecord:
        """Return the record of a file.

        Raises:
            UnknownFileError: the tenant has no file with this id.
        """
        (record,) = await self._read_records([file_id])
        if record is None or record.tenant != tenant:
            raise UnknownFileError(f"unknown file {shown(file_id)}; it may have been deleted or have expired")
        return record

    async def get(self, file_id: str, *, tenant: str = "default") -> FileObject:
        """Return a file.

        Raises: as ``record``.
        """
        return (await self.record(file_id, tenant=tenant)).file

    async def is_known(self, file_id: str) -> bool:
        """Return whether the file exists, for any tenant."""
        return (await self._read_records([file_id]))[0] is not None

    async def content(self, file_id: str, *, tenant: str = "default") -> AsyncIterator[bytes]:
        """Iterate over the contents in chunks.

        Raises:
            UnknownFileError: before the first chunk: as ``record``, or the contents are missing or incomplete in the
                folder.
        """
        file = await self.get(file_id, tenant=tenant)
        async for chunk in self.contents.read(file_id, file.bytes):
            yield chunk

    async def path(self, file_id: str, *, tenant: str = "default") -> Path:
        """Return the path of the complete contents, for a server that sends files itself.

        Raises: as ``content``.
        """
        file = await self.get(file_id, tenant=tenant)
        await self.contents.check(file_id, file.bytes)
        return self.contents.path(file_id)

    async def list(
        self,
        *,
        tenant: str = "default",
        after: str | None = None,
        limit: int = MAX_LIMIT,
        order: str = "desc",
        purpose: str | None = None,
    ) -> Page[FileObject]:
        """Return a page of the tenant's files, newest first unless ``order`` is "asc".

        Raises:
            ValidationError: an argument is invalid, or ``after`` is not a file of the tenant.
        """
        if purpose is not None and purpose not in PURPOSES:
            raise ValidationError(f"purpose must be one of {', '.join(PURPOSES)}, got {shown(purpose)}")

        async def read(ids: Sequence[str]) -> list[FileObject | None]:
            return [None if record is None else record.file for record in await self._read_records(ids)]

        return await read_page(
            self._connection,
            self._keys.files(tenant),
            read,
            lambda file: file.id,
            after=after,
            limit=limit,
            max_limit=MAX_LIMIT,
            order=order,
            matches=lambda file: purpose is None or file.purpose == purpose,
        )

    async def delete(self, file_id: str, *, tenant: str = "default") -> Deleted:
        """Delete a file and its contents. A batch created from it is not affected.

        Raises:
            UnknownFileError: the tenant has no file with this id.
        """
        await self.record(file_id, tenant=tenant)
        keys = [self._keys.file(file_id), self._keys.files(tenant), self._keys.garbage]
        await self._connection.run_script(SCRIPTS["delete_file"], keys, [file_id])
        await self._clear(file_id)
        return Deleted(id=file_id)

    async def clear_garbage(self) -> int:
        """Delete contents of expired and deleted files, and of unfinished uploads. Returns their number.

        Does nothing if this process has no such folder; processes that have it do it.
        """
        num_cleared = 0
        if not await self.contents.exists():
            return 0
        while True:
            due_ms = int(await self.time_s() * 1000)
            limit = ("LIMIT", 0, _CLEAR_AT_ONCE)
            ids = await self._connection.execute("ZRANGEBYSCORE", self._keys.garbage, "-inf", due_ms, *limit)
            for item_id in ids:
                await self._clear(item_id.decode())
            num_cleared += len(ids)
            if len(ids) < _CLEAR_AT_ONCE:
                return num_cleared

    async def time_s(self) -> float:
        """Return the Unix time of Redis, which all hosts share."""
        seconds, microseconds = await self._connection.execute("TIME")
        return int(seconds) + int(microseconds) / 1e6

    async def _renamed(self, upload: Upload, file_id: str) -> Upload:
        await self.reserve(file_id)
        await self.contents.rename(upload.file_id, file_id)
        await self._clear(upload.file_id)
        return msgspec.structs.replace(upload, file_id=file_id)

    async def _clear(self, item_id: str) -> None:
        await self.contents.clear(item_id)
        await self._connection.execute("ZREM", self._keys.garbage, item_id)

    async def _read_records(self, ids: Sequence[str]) -> list[FileRecord | None]:
        records = await self._connection.execute("MGET", *map(self._keys.file, ids))
        return [None if record is None else _record_decoder.decode(record) for record in records]


def file_args(record: FileRecord, created_s: float) -> list[str | bytes | int]:
    """Return the scripts' arguments for a file: id, record, created_ms, expires_ms."""
    expires_at = record.file.expires_at
    expires_ms = "" if expires_at is None else expires_at * 1000
    return [record.file.id, msgspec.json.encode(record), int(created_s * 1000), expires_ms]


def new_file(file_id: str, num_bytes: int, filename: str, expires_after_s: int | None, now: float) -> FileObject:
    """Return the file object of a batch's output, which never expires unless ``expires_after_s`` is set."""
    return FileObject(
        id=file_id,
        bytes=num_bytes,
        created_at=int(now),
        expires_at=None if expires_after_s is None else int(now) + expires_after_s,
        filename=filename,
        purpose="batch_output",
    )


async def read_page(
    connection: CommandConnection,
    key: str,
    read: Callable[[Sequence[str]], Awaitable[Sequence[T | None]]],
    id_of: Callable[[T], str],
    *,
    after: str | None,
    limit: int,
    max_limit: int,
    order: str = "desc",
    matches: Callable[[T], bool] = lambda _: True,
) -> Page[T]:
    """Return up to ``limit`` records that follow ``after``.

    Args:
        read: returns the record of each id; None for a deleted one, whose id is removed from the list.
        max_limit: the highest ``limit``.
        matches: selects the records.

    Raises:
        ValidationError: ``limit`` or ``order`` is invalid, or ``after`` is not in the list.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= max_limit:
        raise ValidationError(f"limit must be 1 to {max_limit}, got {shown(limit)}")
    if order not in ("asc", "desc"):
        raise ValidationError(f"order must be 'asc' or 'desc', got {shown(order)}")
    suffix = "RANK" if order == "asc" else "REVRANK"
    start = 0
    if after is not None:
        rank = await connection.execute(f"Z{suffix}", key, check_text("after", after))
        if rank is None:
            raise ValidationError(f"after must be an id of this list, got {shown(after)}")
        start = int(rank) + 1
    selected: list[T] = []
    while len(selected) <= limit:
        command = "ZRANGE" if order == "asc" else "ZREVRANGE"
        ids = await connection.execute(command, key, start, start + PAGE_READ_SIZE - 1)
        if not ids:
            break
        records = await read([item_id.decode() for item_id in ids])
        deleted: list[Any] = [item_id for item_id, record in zip(ids, records, strict=True) if record is None]
        if deleted:
            await connection.execute("ZREM", key, *deleted)
        start += len(ids) - len(deleted)
        selected += [record for record in records if record is not None and matches(record)]
    data = selected[:limit]
    return Page(
        data=data,
        first_id=id_of(data[0]) if data else None,
        last_id=id_of(data[-1]) if data else None,
        has_more=len(selected) > limit,
    )
