"""The Lua scripts and their hashes. Run by EVALSHA: the text travels only after a server restart."""

from __future__ import annotations

import hashlib
from importlib import resources

import msgspec

_NAMES = ("enqueue", "claim", "append", "finish", "cancel", "release")


class Script(msgspec.Struct, frozen=True):
    """A script's text and the SHA-1 by which Redis knows it."""

    name: str
    text: str
    sha: str


def _load(name: str) -> Script:
    folder = resources.files(__name__.rpartition(".")[0]) / "scripts"
    text = (folder / "lib.lua").read_text() + (folder / f"{name}.lua").read_text()
    return Script(name=name, text=text, sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


SCRIPTS: dict[str, Script] = {name: _load(name) for name in _NAMES}
