"""Finds the logs that readers have not read to the end, for many readers at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ..connection import CommandConnection
from ..keys import ModelKeys
from .repair import run_script


async def find_unread(connection: CommandConnection, keys: ModelKeys, known: Sequence[tuple[str, int]]) -> list[int]:
    """Return the positions in ``known`` of requests that are unknown, or have another number of records.

    Args:
        known: ids of requests of one partition, and how many records of their logs the reader has.
    """
    return await run_script(connection, keys, "unread", [keys.leases], [*chain(*known)])
