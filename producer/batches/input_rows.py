"""Read the rows of an input file: check the whole file first, then read one row at a time."""

from __future__ import annotations

import contextlib
import os
from array import array
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import msgspec

from ...shared.values.shown import shown
from .batch_records import MAX_ROWS, RowProblem

# Limit of reported problems; further ones are usually of the same kinds.
MAX_PROBLEMS = 100
MAX_CUSTOM_ID_CHARS = 512


class InputRow(msgspec.Struct, frozen=True):
    """A line: a request, and the name by which its caller finds the answer."""

    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _BodyHead(msgspec.Struct, frozen=True):
    """The fields of a body that are checked here. The endpoint checks the rest, as an error of that row alone."""

    model: Any = None
    stream: Any = False


_row_decoder = msgspec.json.Decoder(InputRow)
_head_decoder = msgspec.json.Decoder(_BodyHead)


class InputRows:
    """The rows of a checked file by number, from 0; all have the same ``model``. Close it after use."""

    def __init__(self, path: Path, offsets: array[int], model: str) -> None:
        self._offsets = offsets
        self.model = model
        self._fd = os.open(path, os.O_RDONLY)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def read(self, row: int) -> InputRow:
        """Read one row. Blocks on disk access."""
        start = self._offsets[row]
        return _row_decoder.decode(os.pread(self._fd, self._offsets[row + 1] - start, start))

    def close(self) -> None:
        os.close(self._fd)


class _Check:
    """State of the check after some lines: offsets, ids, model and problems."""

    def __init__(self, endpoint: str) -> None:
        self.offsets = array("Q")
        self.problems: list[RowProblem] = []
        self.model = ""
        self._endpoint = endpoint
        self._lines_of: dict[str, int] = {}

    def add(self, number: int, line: bytes) -> None:
        """Check line ``number`` (from 1)."""
        try:
            row = _row_decoder.decode(line)
        except msgspec.ValidationError:
            return self._report("invalid_json_line", number, "the line must be a JSON object")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return self._report("invalid_json_line", number, f"the line must be valid JSON: {error}")
        for name in ("custom_id", "method", "url"):
            if not isinstance(getattr(row, name), str):
                return self._report("missing_required_parameter", number, f"{name} must be given, as a string", name)
        if row.method != "POST":
            return self._report("invalid_method", number, f"method must be 'POST', got {shown(row.method)}", "method")
        if row.url != self._endpoint:
            message = f"url must be the endpoint of the batch, {self._endpoint}, got {shown(row.url)}"
            return self._report("url_mismatch", number, message, "url")
        if not 1 <= len(row.custom_id) <= MAX_CUSTOM_ID_CHARS:
            message = f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters, got {len(row.custom_id)}"
            return self._report("invalid_custom_id", number, message, "custom_id")
        first = self._lines_of.setdefault(row.custom_id, number)
        if first != number:
            message = f"custom_id must be unique, got {shown(row.custom_id)} as in line {first}"
            return self._report("duplicate_custom_id", number, message, "custom_id")
        return self._check_body(number, bytes(row.body))

    def _check_body(self, number: int, body: bytes) -> None:
        try:
            head = _head_decoder.decode(body)
        except msgspec.ValidationError:
            return self._report("missing_required_parameter", number, "body must be given, as a JSON object", "body")
        if not isinstance(head.model, str) or not head.model:
            return self._report("missing_required_parameter", number, "body.model must be given", "body.model")
        if head.stream not in (False, None):
            message = "body.stream must be left out: rows are not streamed"
            return self._report("unsupported_parameter", number, message, "body.stream")
        self.model = self.model or head.model
        if head.model != self.model:
            message = f"body.model must be the same in all lines, got {shown(head.model)} after {shown(self.model)}"
            return self._report("model_mismatch", number, message, "body.model")
        return None

    def _report(self, code: str, line: int, message: str, param: str | None = None) -> None:
        self.problems.append(RowProblem(code=code, message=message, line=line, param=param))


def check_input(path: Path, endpoint: str) -> InputRows | list[RowProblem]:
    """Read a file once, and return its rows or its problems. Blocks on disk access.

    Blank lines are skipped. Memory: 8 bytes and the ``custom_id`` of each row.
    """
    check, end = _Check(endpoint), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            start, end = end, end + len(line)
            if number == 1 and line.startswith(BOM_UTF8):  # editors on Windows write one
                start, line = start + len(BOM_UTF8), line.removeprefix(BOM_UTF8)
            if not line.strip():
                continue
            if len(check.offsets) == MAX_ROWS:
                return [RowProblem(code="too_many_tasks", message=f"a batch must have at most {MAX_ROWS} lines")]
            check.offsets.append(start)
            check.add(number, line)
            if len(check.problems) == MAX_PROBLEMS:
                return check.problems
    if not check.offsets:
        return [RowProblem(code="empty_file", message="the file must have at least one line")]
    check.offsets.append(end)
    return check.problems or InputRows(path, check.offsets, check.model)


def check_linked(source: Path, folder: Path, endpoint: str) -> InputRows | list[RowProblem]:
    """Link ``source`` into the working folder of its batch, where it outlives the deletion of its file, and check it.

    Raises:
        FileNotFoundError: it does not exist, and did not at an earlier run of the batch.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / "input.jsonl"
    if not path.exists():
        with contextlib.suppress(FileExistsError):  # created by another runner just before it lost its lease
            os.link(source, path)
    return check_input(path, endpoint)
