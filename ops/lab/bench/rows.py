"""Which rows there are, and how a command names them. Light, so that ``--help`` is quick."""

from __future__ import annotations

from collections.abc import Sequence

from ....shared.process.command_line import UsageError

QUEUE_ROWS = ("enqueue", "scale", "fairness", "idle", "fleet", "costs", "figures", "follow")
_ENGINE_ROWS = ("engine", "adapter", "gateway", "growth", "sessions", "pooling", "lora", "speculation")
ROWS = (*_ENGINE_ROWS, "durability", "recovery", *QUEUE_ROWS)
PEERS = ("vllm", "transformers", "llama")
NO_PEERS = "none"
DEFAULT_PEERS_FOLDER = ".bench-peers"


def chosen_rows(only: str) -> frozenset[str]:
    """Return the rows that ``--only`` names, comma-separated; all if it is empty.

    Raises:
        UsageError: no row has such a name.
    """
    chosen: set[str] = set()
    for name in _names(only):
        if name == "queue":
            chosen |= set(QUEUE_ROWS)
        elif name in ROWS:
            chosen.add(name)
        else:
            raise UsageError(f"--only must name rows of {', '.join(ROWS)}, or queue, got {name!r}")
    return frozenset(chosen or ROWS)


def chosen_peers(peers: str) -> frozenset[str]:
    """Return the rivals that ``--peers`` names, comma-separated; all if it is empty, none for "none".

    Raises:
        UsageError: no rival has such a name.
    """
    names: Sequence[str] = _names(peers) or PEERS
    if list(names) == [NO_PEERS]:
        return frozenset()
    for name in names:
        if name not in PEERS:
            raise UsageError(f"--peers must name rivals of {', '.join(PEERS)}, or {NO_PEERS}, got {name!r}")
    return frozenset(names)


def _names(words: str) -> list[str]:
    return list(filter(None, (part.strip() for part in words.split(","))))
