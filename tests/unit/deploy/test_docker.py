"""The sources of the images exist; hadolint reads the files where it is installed."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from .manifests import DEPLOY, tool

ROOT = DEPLOY.parents[1]
FILES = sorted((DEPLOY / "docker").glob("Dockerfile*"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """Its instructions, each with its arguments on one line."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    result = subprocess.run([tool("hadolint"), str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_image_runs_unprivileged_with_a_health_check(path: Path) -> None:
    last = [name for name, _ in instructions(path)]
    last = last[len(last) - last[::-1].index("FROM") - 1 :]
    assert "HEALTHCHECK" in last
    users = [arguments for name, arguments in instructions(path) if name == "USER"]
    assert users == ["10001:10001"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_image_has_extras_and_commands(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"penstock-llm\[([\w,]+)\]", path.read_text()) + re.findall(r"EXTRAS=(\w+)", path.read_text())
    assert {name for words in extras for name in words.split(",")} <= set(project["optional-dependencies"])
    (command,) = [arguments for name, arguments in instructions(path) if name == "CMD"]
    assert re.findall(r'"([^"]+)"', command)[0] in project["scripts"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_image_has_the_wheels_and_no_sources(path: Path) -> None:
    copied = [arguments.split()[:-1] for name, arguments in instructions(path) if name == "COPY"]
    assert [sources for sources in copied if not sources[0].startswith("--from=")] == [["dist"], ["constraints.txt"]]
    assert "dist" not in (ROOT / ".dockerignore").read_text().split()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_secret_gets_into_an_image(path: Path) -> None:
    assert not re.search(r"(?i)(password|token|redis_url)\s*=", path.read_text())
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", "**/*.url", "**/users.acl", "**/secrets"} <= set(ignored)
