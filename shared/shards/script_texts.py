"""The scripts of this folder. Each runs at one Redis: at home, or where a model leaves or arrives."""

from __future__ import annotations

from ..redis_access.script import Script, load_scripts

_NAMES = ("place", "open_move", "depart", "arrive", "write_keys", "settle", "switch", "close_move")

SCRIPTS: dict[str, Script] = load_scripts(__name__.rpartition(".")[0], _NAMES)
