"""Lua scripts and their hashes. Run by EVALSHA: the text travels only after a server restart.

A script may begin with a line ``-- uses: NAMES``, which names other files as its parts. Their texts come before its
own, each once, after the parts that they use themselves. So a local function of a part is one of each script that uses
it. ``clock``, which is in this folder, is a part for scripts of all folders.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from importlib.resources.abc import Traversable

import msgspec

_COMMON = {"clock": (resources.files(__name__.rpartition(".")[0]) / "clock.lua").read_text(encoding="utf-8")}


class Script(msgspec.Struct, frozen=True):
    """A script's text and the SHA-1 by which Redis identifies it."""

    name: str
    text: str
    sha: str


def script_of(name: str, text: str) -> Script:
    """Return a script with its hash."""
    return Script(name=name, text=text, sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def read_texts(folder: Traversable) -> dict[str, str]:
    """Return the texts of the Lua files in a folder by their names."""
    return {
        file.name.removesuffix(".lua"): file.read_text(encoding="utf-8")
        for file in folder.iterdir()
        if file.name.endswith(".lua")
    }


def part_names(text: str, parts: Mapping[str, str]) -> list[str]:
    """Return the names of the parts that a text uses, in the order in which they come before it."""
    names: list[str] = []
    uses = re.match(r"-- uses: (.+)\n", text)
    for name in uses[1].split(", ") if uses else ():
        names += [part for part in (*part_names(_text_of_part(name, parts), parts), name) if part not in names]
    return names


def linked_text(text: str, parts: Mapping[str, str]) -> str:
    """Return a text behind those of the parts that it uses."""
    return "".join((*(_text_of_part(name, parts) for name in part_names(text, parts)), text))


def load_scripts(package: str, names: Iterable[str]) -> dict[str, Script]:
    """Return these scripts of a package's folder ``scripts``; its other files may be parts."""
    texts = read_texts(resources.files(package) / "scripts")
    return {name: script_of(name, linked_text(texts[name], texts)) for name in names}


def _text_of_part(name: str, parts: Mapping[str, str]) -> str:
    return parts[name] if name in parts else _COMMON[name]
