"""The key of a command, by which it is routed."""

from __future__ import annotations

from typing import Any

# EVALSHA sha numkeys key…: without keys the first argument, which is a prefix. PUBSUB NUMSUB channel.
_PLACES = {"EVAL": 3, "EVALSHA": 3, "PUBSUB": 2}


def routing_key(args: tuple[Any, ...]) -> str | None:
    """Return the key or channel that says which model a command is of; None if it names none."""
    place = _PLACES.get(args[0], 1)
    key = args[place] if len(args) > place else None
    return key.decode(errors="replace") if isinstance(key, bytes) else key if isinstance(key, str) else None
