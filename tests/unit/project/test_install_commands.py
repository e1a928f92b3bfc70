"""Every install command of the tree names our distribution and extras that it has."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.shared.values.distribution import (
    KERNELS_NAME,
    NAME,
    VERSION,
    full_version,
    install_command,
    kernels_command,
)

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = frozenset(PROJECT["optional-dependencies"])
FOLDERS = (".ci", "kernels", "ops", "producer", "shared", "tests", "worker")
SUFFIXES = frozenset({"", ".md", ".py", ".sh", ".toml", ".txt", ".worker", ".yaml", ".yml"})
# The words of a command up to the end of its line or of the text that it stands in.
COMMAND = re.compile(r"pip install\s+([^\n`()#;]+)")
# Ours or the other project's, which users would get by the name of the import.
REQUIREMENT = re.compile(r"(?<![\w./-])(penstock(?:-\w+)*)(?:\[([^\]\n$]*)\])?(?![\w.-])")
WITH_EXTRAS = re.compile(r"(?:(?<![\w./-])(penstock(?:-\w+)*)|(?<=[\s'\"])(\.))\[([a-z][a-z,]*)\]")
# Adjacent literals are one text.
BETWEEN_LITERALS = re.compile(r"(?<=[^\"\\])\"\n\s*f?\"(?=[^\"])")


@functools.cache
def texts() -> tuple[tuple[Path, str], ...]:
    """Return each file that may name a distribution, with its text."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    pairs: list[tuple[Path, str]] = []
    for path in sorted(files):
        if path.suffix in SUFFIXES and path != Path(__file__) and "vendor" not in path.parts:
            text = path.read_text()
            pairs.append((path.relative_to(ROOT), BETWEEN_LITERALS.sub("", text) if path.suffix == ".py" else text))
    return tuple(pairs)


def requirements(text: str) -> set[tuple[str, str]]:
    """Return the distributions of a text's install commands, and all that have extras, each with its extras."""
    in_commands = {(name, extras) for command in COMMAND.findall(text) for name, extras in REQUIREMENT.findall(command)}
    anywhere = WITH_EXTRAS.findall(text.replace("\\[", "[").replace("\\]", "]"))
    return in_commands | {(name or clone, extras) for name, clone, extras in anywhere}


def faults(text: str) -> list[str]:
    return [
        f"{name}[{extras}]"
        for name, extras in sorted(requirements(text))
        if name not in (NAME, KERNELS_NAME, ".") or not set(filter(None, extras.split(","))) <= EXTRAS
    ]


def test_every_install_command_names_our_distribution_and_its_extras() -> None:
    collected = {path: requirements(text) for path, text in texts()}
    # The pages, messages of programs, Dockerfiles and the Makefile are among the files.
    for name in (
        "README.md",
        "Makefile",
        "ops/deploy/docker/Dockerfile",
        "kernels/dispatch.py",
        "ops/guide/howto/gateway.md",
    ):
        assert collected[Path(name)], name
    assert [f"{path}: {fault}" for path, text in texts() for fault in faults(text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "pip install penstock",
        "`python -m pip install -q penstock psutil`",
        "pip install 'penstock[worker]'",
        "install penstock[worker] first",
        "pip install 'penstock-llm[wrker]'",
        'pip install ".[worker,dashbord]"',
        "pip install penstock-llms",
        "pip install 'penstock-kernels[worker,x]'",
    ],
)
def test_another_distribution_or_an_unknown_extra_is_noticed(text: str) -> None:
    assert faults(text)


@pytest.mark.parametrize(
    "text",
    ["pip install penstock-llm psutil", "pip install -e '.[dev]'", "/opt/penstock/bin/pip install 'penstock-llm[all]'"],
)
def test_a_right_command_is_accepted(text: str) -> None:
    assert faults(text) == []
    assert requirements(text)


def test_calls_name_extras_that_exist() -> None:
    named = {
        (str(path), part.value)
        for path, text in texts()
        if path.suffix == ".py" and path.parts[0] in ("ops", "producer", "shared", "worker")
        if "install_command(" in text or "extra=" in text
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        for part in _extras_of(call)
        if isinstance(part, ast.Constant)
    }
    assert {"embedded", "worker", "gateway", "dashboard"} <= {extra for _, extra in named}
    assert [entry for entry in sorted(named) if entry[1] not in EXTRAS] == []


def _extras_of(call: ast.Call) -> list[ast.expr]:
    if isinstance(call.func, ast.Name) and call.func.id == "install_command":
        return call.args
    return [keyword.value for keyword in call.keywords if keyword.arg == "extra"]


def test_only_one_place_in_the_sources_writes_a_command() -> None:
    """``kernels`` imports nothing of ours, so it spells its command; the test above checks that."""
    spelt = [
        str(path)
        for path, text in texts()
        if path.suffix == ".py" and path.parts[0] in ("ops", "producer", "shared", "worker")
        if re.search(r"pip install '?penstock", text)
    ]
    assert spelt == []


def test_commands_are_quoted_for_the_shell() -> None:
    assert install_command("worker") == "pip install 'penstock-llm[worker]'"
    assert install_command("worker", "distributed") == "pip install 'penstock-llm[worker,distributed]'"
    assert install_command() == "pip install penstock-llm"
    assert kernels_command() == f"pip install penstock-kernels=={VERSION}"


def test_the_project_has_the_name_and_the_version_of_the_module() -> None:
    assert PROJECT["name"] == NAME
    assert PROJECT["dynamic"] == ["version", "readme"]
    kernels = f"{KERNELS_NAME}=={VERSION};"
    for requirement in (text for texts in PROJECT["optional-dependencies"].values() for text in texts):
        assert not requirement.startswith("penstock") or requirement.startswith((f"{NAME}[", kernels)), requirement


def test_the_extras_of_users_are_together_in_all() -> None:
    assert PROJECT["optional-dependencies"]["all"] == [f"{NAME}[worker,gateway,dashboard,embedded,kernels]"]


def test_every_extra_is_described_on_the_install_page() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "ops/guide/operating/install.md").read_text(), re.MULTILINE)
    described = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert described >= EXTRAS


@pytest.mark.parametrize("program", ["penstock", "worker"])
def test_the_programs_print_version_and_commit(program: str) -> None:
    module = {"penstock": "penstock.ops.cli", "worker": "penstock.worker.cli"}[program]
    command = [sys.executable, "-c", f"import {module} as program; program.main(['--version'])"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"{program} {full_version()}\n"
    if (ROOT / ".git").exists():
        assert re.fullmatch(re.escape(VERSION) + r" \([0-9a-f]{12}\)", full_version())
