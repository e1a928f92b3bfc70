"""Adapters in host memory, and their slots."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import structlog

from ....shared.errors import EngineStateError
from ...models.adapters.files import LoadedAdapter

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class AdapterEntry:
    """An adapter in host memory.

    Args:
        num_users: unfinished requests with it. It stays in host memory while there are any.
        num_running: running requests with it. It stays in its slot while there are any.
        is_leaving: whether it is dropped after its last user.
        used: count at the time of its last use.
    """

    loaded: LoadedAdapter
    slot: int | None = None
    num_users: int = 0
    num_running: int = 0
    is_pinned: bool = False
    is_leaving: bool = False
    used: int = 0
    ids: set[int] = field(default_factory=set)

    @property
    def digest(self) -> str:
        return self.loaded.digest


class Slots(Protocol):
    """Slots of a device; ``AdapterSlots``, or those of another engine."""

    num_slots: int
    are_released: bool

    def share_adapter(self, folder: Path, digest: str) -> None: ...

    def keep_adapter(self, loaded: LoadedAdapter) -> None: ...

    def drop_adapter(self, digest: str) -> None: ...

    def assign(self, slot: int, prepared: Any, digest: str) -> None: ...


AnySlots = TypeVar("AnySlots", bound=Slots)


class AdapterPool(Generic[AnySlots]):
    """Holds at most ``max_adapters`` adapters, some of them in device slots. The least recently used are replaced.

    Attributes:
        slots: device slots from which requests use adapters.
    """

    def __init__(self, slots: AnySlots, max_adapters: int) -> None:
        self.slots = slots
        self._max_adapters = max_adapters
        self._entries: dict[str, AdapterEntry] = {}
        self._in_slots: list[AdapterEntry | None] = [None] * slots.num_slots
        self._count = itertools.count(1)
        self._reported_digests: list[str] = []

    def get(self, digest: str) -> AdapterEntry | None:
        return self._entries.get(digest)

    def by_id(self, lora_id: int) -> AdapterEntry | None:
        """Return the adapter with this id of the callers; None if there is none."""
        return next((entry for entry in self._entries.values() if lora_id in entry.ids), None)

    def ids(self) -> list[int]:
        """Return the ids of all adapters that are not leaving, sorted."""
        return sorted(set().union(*(entry.ids for entry in self._entries.values() if not entry.is_leaving)))

    def make_room(self, num_new: int) -> bool:
        """Drop idle adapters until ``num_new`` more fit; return False and do nothing if they cannot."""
        num_to_drop = len(self._entries) + num_new - self._max_adapters
        idle = sorted((entry for entry in self._entries.values() if self._may_go(entry)), key=lambda entry: entry.used)
        if num_to_drop > len(idle):
            return False
        for entry in idle[: max(0, num_to_drop)]:
            self.drop(entry)
        return True

    def put(self, loaded: LoadedAdapter) -> AdapterEntry:
        """Add an adapter, which must fit, on all ranks.

        Raises:
            AdapterFileError, UnsupportedAdapterError: the slots or another rank cannot take it, so that none keeps it.
        """
        self.slots.keep_adapter(loaded)
        entry = self._entries[loaded.digest] = AdapterEntry(loaded, used=next(self._count))
        return entry

    def name(self, entry: AdapterEntry, lora_id: int) -> None:
        """Let ``lora_id`` denote this adapter from now on."""
        for other in self._entries.values():
            other.ids.discard(lora_id)
        entry.ids.add(lora_id)

    def drop(self, entry: AdapterEntry) -> None:
        """Forget an adapter without users. Its weights stay in its slot until the slot is assigned again."""
        if entry.slot is not None:
            self._in_slots[entry.slot] = None
        del self._entries[entry.digest]
        self.slots.drop_adapter(entry.digest)
        log.info("adapter_unloaded", digest=entry.digest)

    def pin(self, entry: AdapterEntry) -> None:
        """Keep an adapter in memory permanently.

        Raises:
            EngineStateError: no slot would be left for others.
        """
        num_pinned = sum(other.is_pinned for other in self._entries.values())
        if not entry.is_pinned and num_pinned + 1 >= len(self._in_slots):
            raise EngineStateError(
                f"pin_lora: {num_pinned} adapters are pinned, and of {len(self._in_slots)} slots (--max-loras) one "
                f"must be left for others; remove a pinned one first"
            )
        entry.is_pinned = True

    def enter_slot(self, entry: AdapterEntry) -> bool:
        """Assign a slot to an adapter, if it has none; return False if no slot is available."""
        entry.used = next(self._count)
        if entry.slot is not None:
            return True
        slot = self._free_slot()
        if slot is None:
            return False
        former = self._in_slots[slot]
        if former is not None:
            former.slot = None
        self._in_slots[slot], entry.slot = entry, slot
        self.slots.assign(slot, entry.loaded.prepared, entry.digest)
        return True

    def pop_changed_digests(self) -> list[str] | None:
        """See ``scheduling.admission.Adapters``. None while the slots sleep, so that no request waits for them."""
        entries = {} if self.slots.are_released else self._entries
        digests = sorted(digest for digest, entry in entries.items() if not entry.is_leaving)
        if digests == self._reported_digests:
            return None
        self._reported_digests = digests
        return list(digests)

    def _free_slot(self) -> int | None:
        """Return an empty slot, or the slot of the least recently used adapter without running requests."""
        if None in self._in_slots:
            return self._in_slots.index(None)
        idle = [
            entry for entry in self._in_slots if entry is not None and not entry.num_running and not entry.is_pinned
        ]
        return min(idle, key=lambda entry: entry.used).slot if idle else None

    @staticmethod
    def _may_go(entry: AdapterEntry) -> bool:
        return not entry.num_users and not entry.is_pinned
