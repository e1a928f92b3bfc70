"""The broker's scripts.

The folders of ``scripts`` say who calls a script: callers, engines, operators, or reapers. ``parts`` has the files that
scripts name in their first line (``redis_access/script.py``). A script uses only the parts that it needs, because each
call creates all functions of its text anew, which takes about 0.1 microseconds each.
"""

from __future__ import annotations

from importlib import resources

from ..queue.policy import QueuePolicy
from ..queue.request_state import moves_as_lua
from ..redis_access.script import Script, linked_text, read_texts, script_of

__all__ = ["PARTS", "SCRIPTS", "Script"]

_TEXTS = {
    folder.name: read_texts(folder)
    for folder in (resources.files(__name__.rpartition(".")[0]) / "scripts").iterdir()
    if folder.is_dir()
}
PARTS = _TEXTS.pop("parts")


def _load(name: str, text: str) -> Script:
    tables = moves_as_lua() + f"local DEFAULT_POLICY = [==[{QueuePolicy().encode().decode()}]==]\n"
    return script_of(name, tables + linked_text(text, PARTS))


SCRIPTS: dict[str, Script] = {name: _load(name, text) for texts in _TEXTS.values() for name, text in texts.items()}
