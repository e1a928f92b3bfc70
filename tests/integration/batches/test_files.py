"""Files: records in Redis, contents in a folder, and nothing left behind by whatever ends too early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.producer.batches import BatchStore
from penstock.producer.batches.batch_records import FileObject
from penstock.producer.batches.files import Files
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import PayloadTooLargeError, UnknownFileError, ValidationError
from penstock.shared.keys import Keys

from .conftest import parts


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


async def make(store: BatchStore, name: str, tenant: str = "default") -> FileObject:
    return await store.files.create(parts(b"{}"), filename=name, tenant=tenant)


async def content(store: BatchStore, file_id: str, tenant: str = "default") -> bytes:
    return b"".join([chunk async for chunk in store.files.content(file_id, tenant=tenant)])


async def test_a_file_is_its_tenants_until_it_is_deleted(store: BatchStore, tmp_path: Path) -> None:
    chunks = [bytes([number]) * 700_000 for number in range(5)]

    async def stream() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    file = await store.files.create(stream(), filename="ä b.jsonl", tenant="acme", expires_after_s=3600)
    assert (file.bytes, file.filename, file.purpose) == (3_500_000, "ä b.jsonl", "batch")
    assert file.expires_at == file.created_at + 3600
    assert await store.files.get(file.id, tenant="acme") == file
    assert await content(store, file.id, "acme") == b"".join(chunks)
    for call in (store.files.get(file.id), store.files.delete(file.id), content(store, file.id)):
        with pytest.raises(UnknownFileError, match=file.id):
            await call
    deleted = await store.files.delete(file.id, tenant="acme")
    assert (deleted.id, deleted.deleted) == (file.id, True)
    with pytest.raises(UnknownFileError):
        await store.files.get(file.id, tenant="acme")
    assert left_in(tmp_path) == []


async def test_an_upload_with_a_known_id_is_that_file(store: BatchStore, tmp_path: Path) -> None:
    """The first upload ends between its steps; a deleted file is uploaded again."""
    file_id = f"file-{'a' * 32}"
    ended = await store.files.receive(parts(b"{}"))
    await store.files.reserve(file_id)
    await store.files.contents.rename(ended.file_id, file_id)
    first = await store.files.keep(await store.files.receive(parts(b"{}")), filename="rows", file_id=file_id)
    later = await store.files.keep(
        await store.files.receive(parts(b"{}")), filename="rows", expires_after_s=3600, file_id=file_id
    )
    assert later == first == await store.files.get(file_id)
    assert left_in(tmp_path) == [file_id]
    await store.files.delete(file_id)
    again = await store.files.keep(await store.files.receive(parts(b"{}")), filename="rows", file_id=file_id)
    assert (again.id, await content(store, file_id)) == (file_id, b"{}\n")
    assert await store.files.clear_garbage() == 0
    assert left_in(tmp_path) == [file_id]


async def test_files_are_listed_in_pages(store: BatchStore) -> None:
    files = [await make(store, f"{number}") for number in range(5)]
    await make(store, "another's", tenant="acme")
    await store.files.delete(files[3].id)
    page = await store.files.list(limit=2)
    assert ([file.filename for file in page.data], page.has_more) == (["4", "2"], True)
    assert (page.first_id, page.last_id) == (files[4].id, files[2].id)
    page = await store.files.list(limit=2, after=page.last_id)
    assert ([file.filename for file in page.data], page.has_more) == (["1", "0"], False)
    page = await store.files.list(order="asc", after=files[0].id, purpose="batch")
    assert [file.filename for file in page.data] == ["1", "2", "4"]
    assert (await store.files.list(purpose="batch_output")).data == []
    wrongs: list[dict[str, Any]] = [{"limit": 0}, {"order": "up"}, {"after": "file-0"}, {"purpose": "vision"}]
    for wrong in wrongs:
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            await store.files.list(**wrong)


async def test_expired_files_and_partial_uploads_are_deleted(
    store: BatchStore, commands: CommandConnection, namespace: str, tmp_path: Path
) -> None:
    async def cut_off() -> AsyncIterator[bytes]:
        yield b"half"
        raise ConnectionError("the caller has gone")

    keys = Keys(namespace).batches()
    small = Files(commands, keys, store.files.contents, max_file_bytes=3)
    with pytest.raises(ConnectionError):
        await store.files.create(cut_off(), filename="a")
    with pytest.raises(PayloadTooLargeError, match="at most 3 bytes"):
        await small.create(parts(b"{}", b"{}"), filename="a")
    with pytest.raises(ValidationError, match="file must not be empty"):
        await store.files.create(parts(), filename="a")
    assert left_in(tmp_path) == []

    kept, expired, orphan = await make(store, "kept"), await make(store, "expired"), await make(store, "orphan")
    # An upload whose process died before its file was known, and a file whose time has come.
    await commands.execute("DEL", keys.file(orphan.id), keys.file(expired.id))
    await commands.execute("ZADD", keys.garbage, 1, orphan.id, 1, expired.id)
    assert await store.files.clear_garbage() == 2
    assert left_in(tmp_path) == [kept.id]
    assert [file.id for file in (await store.files.list()).data] == [kept.id]


async def test_damaged_contents_are_not_returned(store: BatchStore) -> None:
    file = await make(store, "a")
    await asyncio.to_thread(store.files.contents.path(file.id).write_bytes, b"{")
    with pytest.raises(UnknownFileError, match="damaged: 1 bytes of 3"):
        await content(store, file.id)
    await store.files.contents.clear(file.id)
    with pytest.raises(UnknownFileError, match="the folder that all hosts share"):
        await content(store, file.id)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("purpose", {"purpose": "vision"}),
        ("expires_after.seconds", {"expires_after_s": 60}),
        ("filename", {"filename": "a\nb"}),
        ("tenant", {"tenant": "a{b"}),
    ],
)
async def test_wrong_fields_are_named(store: BatchStore, field: str, options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"filename": "a"} | options
    with pytest.raises(ValidationError, match=f"^{field} must"):
        await store.files.create(parts(b"{}"), **given)
