"""Reads records of other processes, some of which this version cannot read: one must not hide all the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from ..process.log import get_logger

# Shown in lists instead of such a record.
UNREADABLE = "unreadable (newer version?)"
# Records are read again every second, so each is logged once.
MAX_TOLD = 1000

T = TypeVar("T")

log = get_logger(__name__)

_told: set[tuple[str, str]] = set()


def decode_record(kind: str, name: str, data: bytes, type_: type[T]) -> T | None:
    """Return a JSON record; None if it cannot be read, which is logged once.

    Args:
        kind: kind of record, such as "model card".
        name: name of the record.
    """
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.MsgspecError, ValueError) as error:  # msgspec lets what a struct itself raises through
        note_unreadable(kind, name, error)
        return None


def decode_records(kind: str, pairs: Iterable[tuple[str, bytes]], type_: type[T]) -> Iterator[T]:
    """Iterate over the readable ones of many records, passed by name."""
    for name, data in pairs:
        record = decode_record(kind, name, data, type_)
        if record is not None:
            yield record


def note_unreadable(kind: str, name: str, error: Exception) -> None:
    """Log once that a record was skipped."""
    if (kind, name) in _told or len(_told) >= MAX_TOLD:
        return
    _told.add((kind, name))
    log.warning("record_unreadable", kind=kind, name=name, reason=str(error))
