"""The scripts of this folder. They run at one Redis each: at home, or where a model leaves or comes."""

from __future__ import annotations

import hashlib
from importlib import resources

import msgspec

_NAMES = ("place", "open_move", "depart", "arrive", "write_keys", "settle", "switch", "close_move")


class ShardScript(msgspec.Struct, frozen=True):
    """A script's text and the SHA-1 by which Redis knows it."""

    name: str
    text: str
    sha: str


def _load(name: str) -> ShardScript:
    text = (resources.files(__name__.rpartition(".")[0]) / "scripts" / f"{name}.lua").read_text(encoding="utf-8")
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return ShardScript(name=name, text=text, sha=sha)


SCRIPTS: dict[str, ShardScript] = {name: _load(name) for name in _NAMES}
