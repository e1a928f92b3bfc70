"""Errors in a file of requests are reported line by line, before any request is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.producer.batches.batch_records import MAX_ROWS, RowProblem
from penstock.producer.batches.input_rows import MAX_PROBLEMS, InputRows, check_input

ENDPOINT = "/v1/completions"
ROW: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": ENDPOINT, "body": {"model": "m", "prompt": "hi"}}


def checked(folder: Path, *lines: bytes | dict[str, Any]) -> InputRows | list[RowProblem]:
    path = folder / "in.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else msgspec.json.encode(line) for line in lines))
    return check_input(path, ENDPOINT)


def test_rows_are_matched_by_number(tmp_path: Path) -> None:
    rows = checked(tmp_path, ROW, b"", ROW | {"custom_id": "b"}, b"  ", ROW | {"custom_id": "ç"})
    assert isinstance(rows, InputRows)
    assert (len(rows), rows.model) == (3, "m")
    assert [rows.read(number).custom_id for number in (2, 0, 1)] == ["ç", "a", "b"]
    assert msgspec.json.decode(rows.read(1).body) == ROW["body"]
    rows.close()


@pytest.mark.parametrize("lines", [(ROW, ROW | {"custom_id": "b"}), (ROW,)])
def test_a_mark_of_utf8_at_the_start_is_skipped(tmp_path: Path, lines: tuple[dict[str, Any], ...]) -> None:
    first, *rest = lines
    rows = checked(tmp_path, b"\xef\xbb\xbf" + msgspec.json.encode(first), *rest)
    assert isinstance(rows, InputRows)
    assert [rows.read(number).custom_id for number in range(len(rows))] == [line["custom_id"] for line in lines]
    rows.close()


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        ({"method": "POST"}, "missing_required_parameter", "custom_id"),
        (ROW | {"custom_id": 7}, "missing_required_parameter", "custom_id"),
        (ROW | {"custom_id": ""}, "invalid_custom_id", "custom_id"),
        (ROW | {"custom_id": "first"}, "duplicate_custom_id", "custom_id"),
        (ROW | {"method": "GET"}, "invalid_method", "method"),
        (ROW | {"url": "/v1/embeddings"}, "url_mismatch", "url"),
        (ROW | {"body": "text"}, "missing_required_parameter", "body"),
        (ROW | {"body": {"prompt": "hi"}}, "missing_required_parameter", "body.model"),
        (ROW | {"body": {"model": "other"}}, "model_mismatch", "body.model"),
        (ROW | {"body": {"model": "m", "stream": True}}, "unsupported_parameter", "body.stream"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: bytes | dict[str, Any], code: str, param: str | None) -> None:
    problems = checked(tmp_path, ROW | {"custom_id": "first"}, line, ROW | {"custom_id": "last"})
    assert isinstance(problems, list)
    assert [(problem.code, problem.line, problem.param) for problem in problems] == [(code, 2, param)]


def test_a_file_may_be_wrong_as_a_whole(tmp_path: Path) -> None:
    def codes(*lines: bytes) -> list[str]:
        problems = checked(tmp_path, *lines)
        assert isinstance(problems, list)
        return [problem.code for problem in problems]

    assert codes(b"", b" ") == ["empty_file"]
    assert codes(*[b"{"] * 200) == ["invalid_json_line"] * MAX_PROBLEMS
    valid = msgspec.json.encode(ROW).replace(b'"a"', b'"%d"')
    assert codes(*[valid % number for number in range(MAX_ROWS + 1)]) == ["too_many_tasks"]
