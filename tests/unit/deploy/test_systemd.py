"""The units are valid for systemd, and the processes send the notifications that the units promise."""

from __future__ import annotations

import configparser
import re
import subprocess
from pathlib import Path

import pytest

from penstock.shared.redis_access.rights import Role

from .manifests import DEPLOY, tool

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
# Of 10; those of a unit that says nothing are 9.6.
MOST_EXPOSED = 2.5
ROLES = {
    "penstock-gateway": Role.GATEWAY,
    "penstock-worker@": Role.WORKER,
    "penstock-jobs": Role.JOBS,
    "penstock-dashboard": Role.OPERATOR,
    "penstock-metrics": Role.OPERATOR,
}


def options(unit: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # names keep their capitals
    parser.read(unit)
    return parser


def test_each_process_has_a_unit() -> None:
    assert {unit.stem for unit in UNITS} == set(ROLES)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_takes_it(unit: Path, tmp_path: Path) -> None:
    """With a program that is there: it looks."""
    text = unit.read_text()
    # Whether this machine has the user or the other units is not the question.
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE)
    copy = tmp_path / unit.name
    copy.write_text(text)
    result = subprocess.run([tool("systemd-analyze"), "verify", str(copy)], capture_output=True, text=True, check=False)
    warnings = [line for line in result.stderr.splitlines() if unit.stem.rstrip("@") in line]
    assert (result.returncode, warnings) == (0, []), result.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_it_may_do_little(unit: Path) -> None:
    command = [tool("systemd-analyze"), "security", "--offline=true", "--no-pager", str(unit)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.search(r"exposure level for \S+: ([\d.]+)", result.stdout)
    assert match, result.stdout[-500:] + result.stderr
    assert float(match[1]) <= MOST_EXPOSED


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_password_is_read_from_a_file(unit: Path) -> None:
    text = unit.read_text()
    assert f"LoadCredential=redis.url:/etc/penstock/{ROLES[unit.stem]}.url" in text
    assert "Environment=PENSTOCK_REDIS_URL_FILE=%d/redis.url" in text
    service = options(unit)["Service"]
    assert "redis" not in service["ExecStart"]
    # Their parent drains the children, and alone gets the signal to end.
    assert (service["Type"], service["NotifyAccess"], service["KillMode"]) == ("notify", "main", "mixed")
