"""Splits commands with many arguments: managed servers accept 3,999 at most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

# With room for the command itself, a script's hash and keys, and what belongs to all parts.
MAX_ARGUMENTS = 3_900

T = TypeVar("T")


def in_parts(items: Sequence[T], arguments_each: int = 1) -> Iterator[Sequence[T]]:
    """Iterate over ``items`` in parts that fit into one command; not at all if there are none.

    Args:
        arguments_each: number of arguments per item.
    """
    size = MAX_ARGUMENTS // arguments_each
    if len(items) <= size:  # nearly always
        if items:
            yield items
        return
    for start in range(0, len(items), size):
        yield items[start : start + size]
