"""The Lua scripts and their hashes. Run by EVALSHA: the text travels only after a server restart."""

from __future__ import annotations

import hashlib
from importlib import resources

import msgspec

from ..queue.policy import QueuePolicy
from ..queue.request_state import moves_as_lua

# What changes who waits, runs or has ended needs all of these; what only writes to a request needs two. Each call
# makes every function of its text anew, about a tenth of a microsecond each.
_SHARED = ("clock", "lib", "rooms", "tenants", "events", "lanes", "damage", "settling", "life")
_PLAIN = (
    "append",
    "renew",
    "renew_client",
    "leave",
    "withdraw",
    "shorten",
    "add_series",
    "read_series",
    "lay_out",
    "count_waiting",
    "set_adapters",
    "unread",
)
# Each script's own parts, in order.
_PARTS = {
    "enqueue": ("enqueue",),
    "claim": ("turns", "claim", "others", "warmth", "adapters", "advance"),
    "append": ("append",),
    "finish": ("finish",),
    "end_segment": ("input", "end_segment"),
    "extend": ("input", "extend"),
    "close_input": ("input", "close_input"),
    "cancel": ("cancel",),
    "release": ("release",),
    "renew": ("renew",),
    "withdraw": ("rooms", "withdraw"),
    "renew_client": ("renew_client",),
    "leave": ("leave",),
    "shorten": ("shorten",),
    "reclaim": ("death", "reclaim"),
    "reap": ("death", "series", "sample", "deadlines", "reap"),
    "expire": ("expire",),
    "park": ("park",),
    "replay": ("replay",),
    "discard": ("discard",),
    "pause": ("pause",),
    "resume": ("resume",),
    "purge": ("purge",),
    "configure": ("configure",),
    "configure_tenant": ("configure_tenant",),
    "stats": ("measures", "stats"),
    "tenant_stats": ("measures", "tenant_stats"),
    "status": ("measures", "status"),
    "requests": ("requests",),
    "add_series": ("series", "add_series"),
    "read_series": ("read_series",),
    "lay_out": ("lay_out",),
    "count_waiting": ("tenants", "count_waiting"),
    "set_adapters": ("set_adapters",),
    "repair": ("repair",),
    "unread": ("unread",),
}

# By their names: which folder one is in says who calls it.
_FILES = {
    file.name: file
    for folder in (resources.files(__name__.rpartition(".")[0]) / "scripts").iterdir()
    for file in folder.iterdir()
}


class Script(msgspec.Struct, frozen=True):
    """A script's text and the SHA-1 by which Redis knows it."""

    name: str
    text: str
    sha: str


def script_of(name: str, text: str) -> Script:
    """Return a script with its hash."""
    return Script(name=name, text=text, sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _load(name: str, parts: tuple[str, ...]) -> Script:
    tables = moves_as_lua() + f"local DEFAULT_POLICY = [==[{QueuePolicy().encode().decode()}]==]\n"
    shared = _SHARED[:2] if name in _PLAIN else _SHARED
    text = tables + "".join(_FILES[f"{part}.lua"].read_text(encoding="utf-8") for part in (*shared, *parts))
    return script_of(name, text)


# The clock alone, for scripts of other things than requests.
CLOCK = _FILES["clock.lua"].read_text(encoding="utf-8")

SCRIPTS: dict[str, Script] = {name: _load(name, parts) for name, parts in _PARTS.items()}
