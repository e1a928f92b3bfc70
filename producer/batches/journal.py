"""The finished rows of a batch: a file per holder of its lease, a line per row, synced to disk before a row counts.

The output files are written from these files in one pass.

Invariant: a row's line in the output is the first one that a pass of one runner finds in these files. A row may occur
twice, if a runner that had lost its lease wrote once more to its own file. Both lines then have the answer of the same
request, and one is used. A line truncated by a crash is invalid JSON, and is skipped.

    work/BATCH/input.jsonl           the input; here it outlives the deletion of its file
    work/BATCH/rows-EPOCH-HOLDER     JournalRow lines
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from ...shared.process.log import get_logger
from ...shared.values.json_lines import escape_line_ends
from .batch_records import BatchSpec, BatchUsage, FileRecord, InputTokensDetails
from .contents import put_in_place
from .files import new_file
from .lease import Fields

log = get_logger(__name__)

_encoder = msgspec.json.Encoder()


class JournalRow(msgspec.Struct, array_like=True, frozen=True):
    """A finished row. ``line`` goes to the output file or, if the row failed, to the error file."""

    row: int
    failed: bool
    line: msgspec.Raw
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


_decoder = msgspec.json.Decoder(JournalRow)


class Tally:
    """Rows and tokens so far. ``is_done`` tells for each row whether it was counted."""

    def __init__(self, num_rows: int) -> None:
        self.is_done = bytearray(num_rows)
        self.completed = self.failed = 0
        self.input_tokens = self.cached_tokens = self.output_tokens = 0

    def add(self, row: JournalRow) -> bool:
        """Count a row. Returns False if it was counted before."""
        if self.is_done[row.row]:
            return False
        self.is_done[row.row] = 1
        self.failed += row.failed
        self.completed += not row.failed
        self.input_tokens += row.num_prompt_tokens
        self.cached_tokens += row.num_cached_tokens
        self.output_tokens += row.num_output_tokens
        return True


class Journal:
    """Appends rows for one holder. Rows that finish at the same time share a write and an fsync."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._pending: list[tuple[bytes, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def append(self, row: JournalRow) -> None:
        """Write a row, and return when it is on disk.

        Raises:
            OSError: the disk is full or missing; the row does not count.
        """
        on_disk: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((_encoder.encode(row) + b"\n", on_disk))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_pending())
        await on_disk

    async def close(self) -> None:
        """Wait for pending writes, and close the file."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        os.close(self._fd)

    async def _write_pending(self) -> None:
        while self._pending:
            rows, self._pending = self._pending, []
            error: OSError | None = None
            try:
                await asyncio.to_thread(_write_all, self._fd, b"".join(line for line, _ in rows))
            except OSError as caught:
                error = caught
            for _, on_disk in rows:
                if on_disk.cancelled():
                    continue
                if error is None:
                    on_disk.set_result(None)
                else:
                    on_disk.set_exception(error)


def journal_path(folder: Path, epoch: int, holder: str) -> Path:
    """Return the path of the journal of an epoch's holder."""
    return folder / f"rows-{epoch:08d}-{holder}"


def read_rows(folder: Path, num_rows: int) -> Iterator[JournalRow]:
    """Iterate over all lines of all holders, starting with the earliest epoch. Blocks on disk access."""
    for path in sorted(folder.glob("rows-*")):
        with path.open("rb") as file:
            for line in file:
                try:
                    row = _decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    log.warning("batch_row_cut_off", journal=path.name)
                    continue
                if 0 <= row.row < num_rows:
                    yield row


def count_rows(folder: Path, num_rows: int) -> Tally:
    """Count the finished rows. Blocks on disk access."""
    counted = Tally(num_rows)
    for row in read_rows(folder, num_rows):
        counted.add(row)
    return counted


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.fsync(fd)


class WrittenFiles(msgspec.Struct, frozen=True):
    """Size and digest by kind ("output", "error") of the files that have lines, and the batch's totals."""

    sizes: dict[str, tuple[int, str]]
    fields: Fields
    num_unfinished: int

    def records(self, spec: BatchSpec, names: Mapping[str, str], now_s: float) -> dict[str, FileRecord]:
        """Return the record of each file by kind; ``names`` has their ids."""
        return {
            kind: FileRecord(
                file=new_file(names[kind], num_bytes, f"{spec.id}_{kind}.jsonl", spec.output_expires_after_s, now_s),
                tenant=spec.tenant,
                sha256=sha256,
            )
            for kind, (num_bytes, sha256) in self.sizes.items()
        }


class _FileWriter:
    """Writer of one of the two files."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.num_bytes = 0
        self._digest = hashlib.sha256()

    def add(self, line: bytes) -> None:
        whole = escape_line_ends(line) + b"\n"
        self.file.write(whole)
        self._digest.update(whole)
        self.num_bytes += len(whole)

    @property
    def size(self) -> tuple[int, str]:
        return self.num_bytes, self._digest.hexdigest()


def write_output(
    folder: Path, paths: Mapping[str, Path], num_rows: int, unfinished: Callable[[int], JournalRow]
) -> WrittenFiles:
    """Write each row's line once, and move the files that have lines to their paths. Blocks on disk access.

    Args:
        folder: the batch's working folder.
        paths: destinations by kind: "output" and "error".
        unfinished: returns the line of a row that is not in the journal.
    """
    tally, num_unfinished = Tally(num_rows), 0
    writers = {kind: _FileWriter((folder / path.name).open("wb")) for kind, path in paths.items()}
    try:
        for row in read_rows(folder, num_rows):
            if tally.add(row):
                writers["error" if row.failed else "output"].add(bytes(row.line))
        for number in [number for number, is_done in enumerate(tally.is_done) if not is_done]:
            row = unfinished(number)
            tally.add(row)
            num_unfinished += 1
            writers["error"].add(bytes(row.line))
        sizes = {kind: writer.size for kind, writer in writers.items() if writer.num_bytes}
        for kind in sizes:
            put_in_place(writers[kind].file, paths[kind])
    finally:
        for writer in writers.values():
            writer.file.close()
            Path(writer.file.name).unlink(missing_ok=True)
    return WrittenFiles(sizes, _fields(tally), num_unfinished)


def _fields(tally: Tally) -> Fields:
    usage = BatchUsage(
        input_tokens=tally.input_tokens,
        input_tokens_details=InputTokensDetails(tally.cached_tokens),
        output_tokens=tally.output_tokens,
        total_tokens=tally.input_tokens + tally.output_tokens,
    )
    return {"completed": tally.completed, "failed": tally.failed, "usage": msgspec.json.encode(usage)}
