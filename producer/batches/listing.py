"""Pages of a tenant's files or batches, newest or oldest first, from a sorted set of ids."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from ...shared.connection import CommandConnection
from ...shared.encodable import check_text
from ...shared.errors import ValidationError
from ...shared.shown import shown
from .batch_records import Page

T = TypeVar("T")

READ_AT_ONCE = 200


async def read_page(
    connection: CommandConnection,
    key: str,
    read: Callable[[Sequence[str]], Awaitable[list[T | None]]],
    id_of: Callable[[T], str],
    *,
    after: str | None,
    limit: int,
    most: int,
    order: str = "desc",
    wanted: Callable[[T], bool] = lambda _: True,
) -> Page[T]:
    """Return up to ``limit`` records that follow ``after``.

    Args:
        read: returns the record of each id, None for one that is gone; such ids are dropped from the list.
        most: the highest ``limit``.

    Raises:
        ValidationError: ``limit`` or ``order`` is none, or ``after`` is not in the list.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= most:
        raise ValidationError(f"limit must be 1 to {most}, got {shown(limit)}")
    if order not in ("asc", "desc"):
        raise ValidationError(f"order must be 'asc' or 'desc', got {shown(order)}")
    suffix = "RANK" if order == "asc" else "REVRANK"
    start = 0
    if after is not None:
        rank = await connection.execute(f"Z{suffix}", key, check_text("after", after))
        if rank is None:
            raise ValidationError(f"after must be an id of this list, got {shown(after)}")
        start = int(rank) + 1
    found: list[T] = []
    while len(found) <= limit:
        command = "ZRANGE" if order == "asc" else "ZREVRANGE"
        ids = await connection.execute(command, key, start, start + READ_AT_ONCE - 1)
        if not ids:
            break
        records = await read([one.decode() for one in ids])
        gone: list[Any] = [one for one, record in zip(ids, records, strict=True) if record is None]
        if gone:
            await connection.execute("ZREM", key, *gone)
        start += len(ids) - len(gone)
        found += [record for record in records if record is not None and wanted(record)]
    data = found[:limit]
    return Page(
        data=data,
        first_id=id_of(data[0]) if data else None,
        last_id=id_of(data[-1]) if data else None,
        has_more=len(found) > limit,
    )
