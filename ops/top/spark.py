"""Sparklines: values over time as one line of text."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"


def spark(values: Sequence[float], width: int) -> str:
    """Return a block for each of the newest ``width`` values, the highest for the largest of them."""
    newest = values[-width:]
    limit = max(newest, default=0.0)
    if limit <= 0:
        return _BLOCKS[0] * len(newest)
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int(value / limit * len(_BLOCKS)))] for value in newest)
