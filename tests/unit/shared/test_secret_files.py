"""Secrets by a variable or by a file that another variable names."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.shared.errors import ConfigurationError
from penstock.shared.process.secret_files import variable_or_file
from penstock.shared.redis_access.embedded import resolve_redis_url
from penstock.shared.shards import parse_shards

NAME = "PENSTOCK_REDIS_URL"


def test_a_file_is_read_without_the_end_of_its_line(tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text("redis://:secret@host\n")
    assert variable_or_file(NAME, {f"{NAME}_FILE": str(path)}) == "redis://:secret@host"
    assert variable_or_file(NAME, {NAME: "redis://other"}) == "redis://other"
    assert variable_or_file(NAME, {NAME: "", f"{NAME}_FILE": ""}) == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read (No such file or directory)"), (b"\n", "is empty"), (b"\xff\xfe", "(it is no text)")],
)
def test_errors_of_a_file_are_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "url"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        variable_or_file(NAME, {f"{NAME}_FILE": str(path)})
    assert f"{NAME}_FILE names {path}" in str(caught.value)
    assert message in str(caught.value)


def test_both_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="both set") as caught:
        variable_or_file(NAME, {NAME: "redis://:secret@host", f"{NAME}_FILE": str(tmp_path)})
    assert "secret" not in str(caught.value)


def test_commands_and_shards_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text("redis://:secret@host\n")
    (tmp_path / "shards").write_text("a=redis://:secret@a\n")
    monkeypatch.delenv(NAME, raising=False)
    monkeypatch.setenv(f"{NAME}_FILE", str(tmp_path / "url"))
    monkeypatch.setenv("PENSTOCK_SHARDS_FILE", str(tmp_path / "shards"))
    with resolve_redis_url(None) as url:
        assert url == "redis://:secret@host"
    with resolve_redis_url("redis://given") as url:
        assert url == "redis://given"
    assert parse_shards(None) == {"a": "redis://:secret@a"}
