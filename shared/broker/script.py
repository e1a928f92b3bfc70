"""The Lua scripts and their hashes. Run by EVALSHA: the text travels only after a server restart.

The folders of ``scripts`` name who calls a script: callers, engines, operators, or reaping, which time calls for. A
script begins with a line ``-- uses: NAMES``, which names files of ``scripts/parts``. Their texts come before its own,
each once, after the parts that they use themselves. So a function of a part is a local of every script that uses it.
A script uses only the parts that it needs, because each call creates all functions of its text anew, which takes about
0.1 microseconds each.
"""

from __future__ import annotations

import hashlib
import re
from importlib import resources

import msgspec

from ..queue.policy import QueuePolicy
from ..queue.request_state import moves_as_lua

_FOLDERS = {folder.name: folder for folder in (resources.files(__name__.rpartition(".")[0]) / "scripts").iterdir()}
_TEXTS = {
    folder: {file.name.removesuffix(".lua"): file.read_text(encoding="utf-8") for file in files.iterdir()}
    for folder, files in _FOLDERS.items()
}
_PARTS = _TEXTS.pop("parts")


class Script(msgspec.Struct, frozen=True):
    """A script's text and the SHA-1 by which Redis identifies it."""

    name: str
    text: str
    sha: str


def script_of(name: str, text: str) -> Script:
    """Return a script with its hash."""
    return Script(name=name, text=text, sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def part_names(text: str) -> list[str]:
    """Return the parts that a script or a part uses, in the order in which they come before it."""
    names: list[str] = []
    uses = re.match(r"-- uses: (.+)\n", text)
    for name in uses[1].split(", ") if uses else ():
        names += [part for part in (*part_names(_PARTS[name]), name) if part not in names]
    return names


def _load(name: str, text: str) -> Script:
    tables = moves_as_lua() + f"local DEFAULT_POLICY = [==[{QueuePolicy().encode().decode()}]==]\n"
    return script_of(name, "".join((tables, *(_PARTS[part] for part in part_names(text)), text)))


# The clock alone, for scripts of other things than requests.
CLOCK = _PARTS["clock"]

SCRIPTS: dict[str, Script] = {name: _load(name, text) for texts in _TEXTS.values() for name, text in texts.items()}
