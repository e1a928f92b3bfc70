"""Records of other processes that this version cannot read: one of them must not hide all the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from ..process.log import get_logger

# What lists show in place of such a record.
UNREADABLE = "unreadable (newer version?)"
# Records are read again every second; each is told of once.
MAX_TOLD = 1000

T = TypeVar("T")

log = get_logger(__name__)

_told: set[tuple[str, str]] = set()


def decode_record(kind: str, name: str, data: bytes, type_: type[T]) -> T | None:
    """Return a JSON record; None if it cannot be read, which the log tells once.

    Args:
        kind: of the records, as "model card".
        name: which one it is.
    """
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.MsgspecError, ValueError) as error:  # msgspec lets what a struct itself raises through
        note_unreadable(kind, name, error)
        return None


def decode_records(kind: str, pairs: Iterable[tuple[str, bytes]], type_: type[T]) -> Iterator[T]:
    """Iterate over those of many records that can be read, given by name."""
    for name, data in pairs:
        record = decode_record(kind, name, data, type_)
        if record is not None:
            yield record


def note_unreadable(kind: str, name: str, error: Exception) -> None:
    """Tell the log once that a record was passed over."""
    if (kind, name) in _told or len(_told) >= MAX_TOLD:
        return
    _told.add((kind, name))
    log.warning("record_unreadable", kind=kind, name=name, reason=str(error))
