"""Each script names the parts that it uses: all names in its text are its own, a part's, or Lua's."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from penstock.producer.batches.files import SCRIPTS as BATCH_SCRIPTS
from penstock.shared.broker.script import PARTS, SCRIPTS
from penstock.shared.deployment.groups import SCRIPTS as GROUP_SCRIPTS
from penstock.shared.lora.registry import SCRIPTS as ADAPTER_SCRIPTS
from penstock.shared.redis_access import script as script_module
from penstock.shared.redis_access.script import Script, linked_text, part_names
from penstock.shared.shards.placements import SCRIPTS as SHARD_SCRIPTS

LUA = set(
    re.findall(
        r"\w+",
        "and break do else elseif end false for function if in local nil not or repeat return then true until while "
        "ARGV KEYS _ cjson cmsgpack error ipairs math next pairs pcall rawget redis select setmetatable string table "
        "tonumber tostring type unpack",
    )
)
NAMES = r"((?:\w+,\s*)*\w+)"


def code_of(text: str) -> str:
    """Return a script's text without comments, and with empty strings."""
    text = re.sub(r"\[==\[.*?\]==\]", "''", text, flags=re.DOTALL)
    return re.sub(r"'(?:\\.|[^'\\])*'", "''", re.sub(r"--[^\n]*", "", text))


def undeclared_names(text: str) -> set[str]:
    code = code_of(text)
    lists = re.findall(rf"\blocal\s+(?!function\b){NAMES}", code) + re.findall(rf"\bfor\s+{NAMES}\s*(?:=|in\b)", code)
    lists += re.findall(r"\blocal function (\w+)", code) + re.findall(r"\bfunction\b[^(\n]*\(([^)]*)\)", code)
    declared = {name for names in lists for name in re.split(r",\s*", names)}
    used = set(re.findall(r"(?<![\w.:'])([A-Za-z_]\w*)\b(?!\s*=[^=])", code))
    return used - declared - LUA


ALL = (
    *SCRIPTS.values(),
    *BATCH_SCRIPTS.values(),
    *GROUP_SCRIPTS.values(),
    *ADAPTER_SCRIPTS.values(),
    *SHARD_SCRIPTS.values(),
)


@pytest.mark.parametrize("script", ALL, ids=lambda script: script.name)
def test_a_script_names_all_parts_that_it_uses(script: Script) -> None:
    assert undeclared_names(script.text) == set()


def test_a_client_links_no_script_at_its_start() -> None:
    code = """
import penstock.producer
from penstock.shared.broker import SCRIPTS
print([name for name, script in SCRIPTS.items() if "text" in vars(script)])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_a_missing_part_is_noticed() -> None:
    assert undeclared_names("-- uses: lib\nreturn close_request(ARGV[1])") == {"close_request"}


def test_a_part_is_included_once_and_after_its_dependencies() -> None:
    parts = part_names("-- uses: turns, affinity\n", PARTS)
    assert parts[:2] == ["clock", "lib"]
    assert parts[-2:] == ["turns", "affinity"]
    assert len(parts) == len(set(parts))


def test_the_names_of_a_part_are_read_once_for_all_scripts() -> None:
    """A program links a dozen scripts, of parts that many of them use."""
    used_names, declared_names = script_module._used_names, script_module._declared_names
    parts = {"one": "local of_one = 1\n", "two": "-- uses: one\nlocal of_two = of_one\n"}
    before = used_names.cache_info().misses, declared_names.cache_info().misses
    for number in range(10):
        linked_text(f"-- uses: two\nreturn of_one + of_two + {number}\n", parts)
    misses = used_names.cache_info().misses - before[0], declared_names.cache_info().misses - before[1]
    assert max(misses) <= len(parts) + 10 + 1  # and the tables, which are empty
