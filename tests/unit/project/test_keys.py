"""The scripts of the broker use the keys of ``shared/keys.py``, and its table has no others."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from penstock.shared import keys

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((ROOT / "shared" / "broker" / "scripts").rglob("*.lua"))


def kinds_in_the_table() -> set[str]:
    """``request`` of ``NS:{MODEL}:request:ID``."""
    return set(re.findall(r"^ +NS:\{MODEL\}:(\w+)", keys.__doc__ or "", re.MULTILINE))


def kinds_in_scripts() -> dict[str, str]:
    """Each kind with a script that has it; a string is appended to the prefix, or made in one piece with it."""
    spellings: dict[str, str] = {}
    for path in SCRIPTS:
        for kind in re.findall(r"prefix\s*\.\.\s*['\"](\w+)", path.read_text()):
            spellings[kind] = path.name
    return spellings


def kinds_in_python() -> set[str]:
    return set(re.findall(r'prefix(?: \+ "|\})(\w+)', inspect.getsource(keys.ModelKeys)))


def test_every_key_of_a_script_stands_in_the_table() -> None:
    used = kinds_in_scripts()
    assert len(used) > 20
    assert {kind: script for kind, script in used.items() if kind not in kinds_in_the_table()} == {}


def test_every_key_of_the_table_is_used() -> None:
    assert kinds_in_the_table() == kinds_in_scripts().keys() | kinds_in_python()


def test_every_channel_of_a_script_begins_with_the_prefix_of_its_model() -> None:
    """In other databases than 0 connections replace these words by the database's (``DatabaseChannels``)."""
    lua = [path for folder in ("shared", "producer", "ops") for path in (ROOT / folder).rglob("*.lua")]
    uses = [
        use for path in lua for use in re.findall(r"'(?:S?PUBLISH|(?:SHARD)?NUMSUB)',? ?(\w+ ?\.\.)?", path.read_text())
    ]
    assert len(uses) >= 7
    assert {*uses} == {"prefix .."}
