"""Cache of processed and encoded images with a limit in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class HasNumBytes(Protocol):
    """A value with a size in bytes."""

    @property
    def num_bytes(self) -> int: ...


Value = TypeVar("Value", bound=HasNumBytes)


class ImageCache(Generic[Value]):
    """Cache that drops the least recently used values. For a single thread.

    Args:
        max_bytes: 0 to cache nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, Value] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Value | None:
        """Return the value of ``key``; None if it is not cached."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: Hashable, value: Value) -> None:
        """Cache ``value``, unless it is larger than the whole cache."""
        replaced = self._entries.pop(key, None)
        if replaced is not None:
            self.num_bytes -= replaced.num_bytes
        if value.num_bytes > self._max_bytes:
            return
        self._entries[key] = value
        self.num_bytes += value.num_bytes
        while self.num_bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.num_bytes -= dropped.num_bytes

    def clear(self) -> int:
        """Drop all entries; return how many there were."""
        num_entries = len(self._entries)
        self._entries.clear()
        self.num_bytes = 0
        return num_entries
