"""What was made of images, kept within a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """Something that says how much memory it takes."""

    @property
    def num_bytes(self) -> int: ...


Value = TypeVar("Value", bound=Sized)


class ImageCache(Generic[Value]):
    """Drops what was not asked for the longest. Of one thread.

    Args:
        max_bytes: 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, Value] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Value | None:
        """What is kept under ``key``."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: Hashable, value: Value) -> None:
        """Keep ``value``, if it is not larger than all that may be kept."""
        old = self._entries.pop(key, None)
        if old is not None:
            self.num_bytes -= old.num_bytes
        if value.num_bytes > self._max_bytes:
            return
        self._entries[key] = value
        self.num_bytes += value.num_bytes
        while self.num_bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.num_bytes -= dropped.num_bytes

    def clear(self) -> int:
        """Forget everything; returns how many entries there were."""
        num_entries = len(self._entries)
        self._entries.clear()
        self.num_bytes = 0
        return num_entries
