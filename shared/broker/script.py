"""The Lua scripts and their hashes. Run by EVALSHA: the text travels only after a server restart."""

from __future__ import annotations

import hashlib
from importlib import resources

import msgspec

# Each script's parts, in order; ``lib`` is put in front of all.
_PARTS = {
    "enqueue": ("enqueue",),
    "claim": ("claim",),
    "append": ("append",),
    "finish": ("finish",),
    "cancel": ("cancel",),
    "release": ("release",),
    "renew": ("renew",),
    "renew_client": ("renew_client",),
    "reclaim": ("death", "reclaim"),
    "reap": ("death", "reap"),
    "park": ("park",),
    "replay": ("replay",),
}


class Script(msgspec.Struct, frozen=True):
    """A script's text and the SHA-1 by which Redis knows it."""

    name: str
    text: str
    sha: str


def _load(name: str, parts: tuple[str, ...]) -> Script:
    folder = resources.files(__name__.rpartition(".")[0]) / "scripts"
    text = "".join((folder / f"{part}.lua").read_text() for part in ("lib", *parts))
    return Script(name=name, text=text, sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


SCRIPTS: dict[str, Script] = {name: _load(name, parts) for name, parts in _PARTS.items()}
