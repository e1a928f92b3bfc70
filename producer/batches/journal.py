"""What is done of a batch: a file for each holder of its lease, a line for each row, on the disk before it counts.

Invariant: a row's line in the final files is the first that one pass of one runner finds in these files. A row may
stand in them twice, when a runner that had lost its lease wrote once more, in the file of its own: both lines have the
answer of the same request, and one is taken. A line that was cut off by a death is no JSON, and is passed over.

    work/BATCH/input.jsonl           the input; here it outlives the deletion of its file
    work/BATCH/rows-EPOCH-HOLDER     JournalRow lines
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...shared.log import get_logger

log = get_logger(__name__)


class JournalRow(msgspec.Struct, array_like=True, frozen=True):
    """A row that is done: ``line`` is what its caller gets, into the output file or, if it failed, the errors."""

    row: int
    failed: bool
    line: msgspec.Raw
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(JournalRow)


class Tally:
    """Rows and tokens so far; ``is_done`` says of each row whether it counts already."""

    def __init__(self, num_rows: int) -> None:
        self.is_done = bytearray(num_rows)
        self.completed = self.failed = 0
        self.input_tokens = self.cached_tokens = self.output_tokens = 0

    def add(self, done: JournalRow) -> bool:
        """Count a row; False if it was counted before."""
        if self.is_done[done.row]:
            return False
        self.is_done[done.row] = 1
        self.failed += done.failed
        self.completed += not done.failed
        self.input_tokens += done.num_prompt_tokens
        self.cached_tokens += done.num_cached_tokens
        self.output_tokens += done.num_output_tokens
        return True


class Journal:
    """Appends rows for one holder. Rows of many tasks that are done at once share a write and an fsync."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._pending: list[tuple[bytes, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def append(self, done: JournalRow) -> None:
        """Return when ``done`` is on the disk.

        Raises:
            OSError: the disk is full or gone; the row does not count.
        """
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((_encoder.encode(done) + b"\n", written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        await written

    async def close(self) -> None:
        """Wait for what is being written, and close."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        os.close(self._fd)

    async def _write(self) -> None:
        while self._pending:
            rows, self._pending = self._pending, []
            error: OSError | None = None
            try:
                await asyncio.to_thread(_write_all, self._fd, b"".join(line for line, _ in rows))
            except OSError as caught:
                error = caught
            for _, written in rows:
                if written.cancelled():
                    continue
                if error is None:
                    written.set_result(None)
                else:
                    written.set_exception(error)


def journal_path(folder: Path, epoch: int, holder: str) -> Path:
    """Where the holder of an epoch notes its rows."""
    return folder / f"rows-{epoch:08d}-{holder}"


def read_rows(folder: Path, num_rows: int) -> Iterator[JournalRow]:
    """Iterate over all lines of all holders, the earliest epoch first; blocks for the disk."""
    for path in sorted(folder.glob("rows-*")):
        with path.open("rb") as file:
            for line in file:
                try:
                    done = _decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    log.warning("batch_row_cut_off", journal=path.name)
                    continue
                if 0 <= done.row < num_rows:
                    yield done


def tally(folder: Path, num_rows: int) -> Tally:
    """Count what is done; blocks for the disk."""
    counted = Tally(num_rows)
    for done in read_rows(folder, num_rows):
        counted.add(done)
    return counted


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.fsync(fd)
