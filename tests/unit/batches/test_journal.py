"""Rows that are done stay done, and come into the final files once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from penstock.producer.batches.journal import Journal, JournalRow, count_rows, journal_path, write_output


def done(row: int, text: str, *, failed: bool = False) -> JournalRow:
    line = msgspec.Raw(msgspec.json.encode({"row": row, "text": text}))
    return JournalRow(row, failed, line, num_prompt_tokens=5, num_output_tokens=2)


def write(path: Path, *rows: JournalRow) -> None:
    async def append() -> None:
        journal = await asyncio.to_thread(Journal, path)
        await asyncio.gather(*map(journal.append, rows))
        await journal.close()

    asyncio.run(append())


def test_each_row_has_one_line_whatever_the_journals_hold(tmp_path: Path) -> None:
    first, second = journal_path(tmp_path, 1, "a"), journal_path(tmp_path, 2, "b")
    write(first, done(3, "first"), done(0, "first"))
    first.write_bytes(first.read_bytes() + b'[1, false, {"row": 1, "te')
    write(second, done(1, "second"), done(2, "second", failed=True), done(3, "second"))
    # An old runner wakes up, and writes behind the part that it had cut off, and once more a row of another's.
    write(journal_path(tmp_path, 1, "c"), done(1, "late"), done(7, "none of this batch"))

    counted = count_rows(tmp_path, 5)
    assert list(counted.is_done) == [1, 1, 1, 1, 0]
    assert (counted.completed, counted.failed, counted.input_tokens, counted.output_tokens) == (3, 1, 20, 8)

    paths = {kind: tmp_path / "files" / kind for kind in ("output", "error")}
    (tmp_path / "files").mkdir()
    counts = write_output(tmp_path, paths, 5, lambda row: done(row, "unfinished", failed=True))
    rows = {kind: [msgspec.json.decode(line) for line in paths[kind].read_bytes().splitlines()] for kind in paths}
    assert {(line["row"], line["text"]) for line in rows["output"]} == {(0, "first"), (3, "first"), (1, "late")}
    assert [(line["row"], line["text"]) for line in rows["error"]] == [(2, "second"), (4, "unfinished")]
    assert counts.num_unfinished == 1
    assert {kind: size for kind, (size, _) in counts.sizes.items()} == {
        kind: path.stat().st_size for kind, path in paths.items()
    }


async def test_a_row_that_cannot_be_written_does_not_count(tmp_path: Path) -> None:
    journal = await asyncio.to_thread(Journal, Path("/dev/full"))
    with pytest.raises(OSError, match="No space"):
        await journal.append(done(0, "lost"))
    await journal.close()
