"""Lua scripts and their hashes. Run by EVALSHA: the text travels only after a server restart.

A script may begin with a line ``-- uses: NAMES``, which names other files as its parts. Their texts come before its
own, each once, after the parts that they use themselves. So a local function of a part is one of each script that uses
it. ``clock``, which is in this folder, is a part for scripts of all folders.

Each text is a function within the function of the text before it. Each call creates all functions of its script anew.
For each name that a new function uses of the function around it, Lua walks over all names that functions have used of
that one so far. Names of functions further out are copied without such a walk.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache, partial
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import chain

# A Lua function uses at most this many names of the functions around it.
_MAX_OUTER_NAMES = 60
_COMMON = {"clock": (resources.files(__name__.rpartition(".")[0]) / "clock.lua").read_text(encoding="utf-8")}


class Script:
    """A script, which is linked when it is first used, since each program uses few of all.

    Args:
        link: returns its text.
    """

    def __init__(self, name: str, link: Callable[[], str]) -> None:
        self.name = name
        self._link = link

    @cached_property
    def text(self) -> str:
        """The text that Redis runs."""
        return self._link()

    @cached_property
    def sha(self) -> str:
        """The SHA-1 of its text, by which Redis identifies it."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


def script_of(name: str, text: str) -> Script:
    """Return a script with a text that has no parts."""
    return Script(name, lambda: text)


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


def linked_text(text: str, parts: Mapping[str, str], tables: str = "") -> str:
    """Return a text behind those of the parts that it uses, and these behind ``tables``, which all may use."""
    texts = [tables, *(_text_of_part(name, parts) for name in part_names(text, parts)), text]
    linked, num_nested = texts[0], 0
    outer_names = _declared_names(texts[0])
    for i, own_text in enumerate(texts[1:], start=1):
        num_outer_names = len(outer_names.intersection(chain(*map(_used_names, texts[i:]))))
        if 0 < num_outer_names <= _MAX_OUTER_NAMES:
            linked, num_nested = f"{linked}return (function() ", num_nested + 1
        linked += own_text
        outer_names |= _declared_names(own_text)
    return linked + "end)()\n" * num_nested


# A program links a dozen scripts, of parts that many of them use.
@lru_cache(maxsize=64)
def _declared_names(text: str) -> frozenset[str]:
    """Return the names that a text declares for those behind it: locals of lines that are not indented."""
    lists = re.findall(r"^local (?:function )?(\w+(?:, *\w+)*)", text, re.MULTILINE)
    return frozenset(name for names in lists for name in re.split(", *", names))


@lru_cache(maxsize=64)
def _used_names(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", re.sub(r"--.*", "", text)))


def load_scripts(package: str, names: Iterable[str]) -> dict[str, Script]:
    """Return these scripts of a package's folder ``scripts``; its other files may be parts."""
    texts = read_texts(resources.files(package) / "scripts")
    return {name: Script(name, partial(linked_text, texts[name], texts)) for name in names}


def _text_of_part(name: str, parts: Mapping[str, str]) -> str:
    return parts[name] if name in parts else _COMMON[name]
