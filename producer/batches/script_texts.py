"""The Lua scripts of files and batches. Each can safely run twice, because the connection repeats calls with lost
replies."""

from __future__ import annotations

import hashlib
from importlib import resources

from ...shared.broker.script import CLOCK, Script

_NAMES = ("put_file", "delete_file", "create", "take", "write", "close", "cancel")


def _load(name: str) -> Script:
    folder = resources.files(__name__.rpartition(".")[0]) / "scripts"
    text = CLOCK + "".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("lib", name))
    return Script(name=name, text=text, sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


SCRIPTS: dict[str, Script] = {name: _load(name) for name in _NAMES}
