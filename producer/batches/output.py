"""Write the output files of a batch from its journal, in one pass."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from ...shared.json_lines import escape_line_ends
from .batch_records import BatchSpec, BatchUsage, FileRecord, InputTokensDetails
from .contents import put_in_place
from .files import new_file
from .journal import JournalRow, Tally, read_rows
from .lease import Fields


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
