"""What readers have not heard of, asked for many of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ..connection import CommandConnection
from ..keys import ModelKeys
from .repair import run_script


async def find_unread(connection: CommandConnection, keys: ModelKeys, known: Sequence[tuple[str, int]]) -> list[int]:
    """Return the places in ``known`` of those requests whose log has more, or fewer, records, or that are unknown.

    Args:
        known: ids of requests of one partition, and how many records of their logs are known.
    """
    return await run_script(connection, keys, "unread", [keys.leases], [*chain(*known)])
