"""Read pages of a tenant's files or batches from a sorted set of ids, newest or oldest first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from ...shared.connection import CommandConnection
from ...shared.errors import ValidationError
from ...shared.values.checks import check_text
from ...shared.values.shown import shown
from .batch_records import Page

T = TypeVar("T")

PAGE_READ_SIZE = 200


async def read_page(
    connection: CommandConnection,
    key: str,
    read: Callable[[Sequence[str]], Awaitable[list[T | None]]],
    id_of: Callable[[T], str],
    *,
    after: str | None,
    limit: int,
    max_limit: int,
    order: str = "desc",
    matches: Callable[[T], bool] = lambda _: True,
) -> Page[T]:
    """Return up to ``limit`` records that follow ``after``.

    Args:
        read: returns the record of each id; None for a deleted one, whose id is removed from the list.
        max_limit: the highest ``limit``.
        matches: selects the records.

    Raises:
        ValidationError: ``limit`` or ``order`` is invalid, or ``after`` is not in the list.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= max_limit:
        raise ValidationError(f"limit must be 1 to {max_limit}, got {shown(limit)}")
    if order not in ("asc", "desc"):
        raise ValidationError(f"order must be 'asc' or 'desc', got {shown(order)}")
    suffix = "RANK" if order == "asc" else "REVRANK"
    start = 0
    if after is not None:
        rank = await connection.execute(f"Z{suffix}", key, check_text("after", after))
        if rank is None:
            raise ValidationError(f"after must be an id of this list, got {shown(after)}")
        start = int(rank) + 1
    selected: list[T] = []
    while len(selected) <= limit:
        command = "ZRANGE" if order == "asc" else "ZREVRANGE"
        ids = await connection.execute(command, key, start, start + PAGE_READ_SIZE - 1)
        if not ids:
            break
        records = await read([item_id.decode() for item_id in ids])
        deleted: list[Any] = [item_id for item_id, record in zip(ids, records, strict=True) if record is None]
        if deleted:
            await connection.execute("ZREM", key, *deleted)
        start += len(ids) - len(deleted)
        selected += [record for record in records if record is not None and matches(record)]
    data = selected[:limit]
    return Page(
        data=data,
        first_id=id_of(data[0]) if data else None,
        last_id=id_of(data[-1]) if data else None,
        has_more=len(selected) > limit,
    )
