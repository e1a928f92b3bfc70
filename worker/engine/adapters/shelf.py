"""The adapters in host memory, and which slot each is in."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import structlog

from ....shared.errors import EngineStateError
from ...models.adapters.load import LoadedAdapter
from ...models.adapters.slots import AdapterSlots

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class HeldAdapter:
    """One adapter.

    Args:
        num_users: unfinished requests with it; while there are any it stays in host memory.
        num_running: those of them that run; while there are any it stays in its slot.
        is_leaving: it goes with its last user.
        used: when it was used last, as a count.
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


class AdapterShelf:
    """At most ``max_held`` adapters, of which as many are in slots as there are. Those used least lately go first.

    Attributes:
        slots: where they are computed with.
    """

    def __init__(self, slots: AdapterSlots, max_held: int) -> None:
        self.slots = slots
        self._max_held = max_held
        self._held: dict[str, HeldAdapter] = {}
        self._in_slots: list[HeldAdapter | None] = [None] * slots.num_slots
        self._count = itertools.count(1)
        self._told: list[str] = []

    def get(self, digest: str) -> HeldAdapter | None:
        return self._held.get(digest)

    def by_id(self, lora_id: int) -> HeldAdapter | None:
        """The adapter that callers know by that number."""
        return next((held for held in self._held.values() if lora_id in held.ids), None)

    def ids(self) -> list[int]:
        """All those numbers, sorted."""
        return sorted(set().union(*(held.ids for held in self._held.values() if not held.is_leaving)))

    def make_room(self, num_wanted: int) -> bool:
        """Drop what nobody uses until there is room for so many more; False, and nothing is done, if there is not."""
        num_to_drop = len(self._held) + num_wanted - self._max_held
        idle = sorted((held for held in self._held.values() if self._may_go(held)), key=lambda held: held.used)
        if num_to_drop > len(idle):
            return False
        for held in idle[: max(0, num_to_drop)]:
            self.drop(held)
        return True

    def put(self, loaded: LoadedAdapter) -> HeldAdapter:
        """Take in an adapter, for which there is room."""
        held = self._held[loaded.digest] = HeldAdapter(loaded, used=next(self._count))
        return held

    def name(self, held: HeldAdapter, lora_id: int) -> None:
        """From now on ``lora_id`` means this adapter."""
        for other in self._held.values():
            other.ids.discard(lora_id)
        held.ids.add(lora_id)

    def drop(self, held: HeldAdapter) -> None:
        """Forget an adapter that nobody uses. What is in its slot stays there until another comes."""
        if held.slot is not None:
            self._in_slots[held.slot] = None
        del self._held[held.digest]
        log.info("adapter_unloaded", digest=held.digest)

    def pin(self, held: HeldAdapter) -> None:
        """Keep an adapter whatever others come.

        Raises:
            EngineStateError: no slot would be left for others.
        """
        num_pinned = sum(other.is_pinned for other in self._held.values())
        if not held.is_pinned and num_pinned + 1 >= len(self._in_slots):
            raise EngineStateError(
                f"pin_lora: {num_pinned} adapters are pinned, and of {len(self._in_slots)} slots (--max-loras) one "
                f"must be left for others; remove a pinned one first"
            )
        held.is_pinned = True

    def enter_slot(self, held: HeldAdapter) -> bool:
        """Have it in a slot, where it stays while ``num_running`` says so; False if there is none for it."""
        held.used = next(self._count)
        if held.slot is not None:
            return True
        slot = self._free_slot()
        if slot is None:
            return False
        former = self._in_slots[slot]
        if former is not None:
            former.slot = None
        self._in_slots[slot], held.slot = held, slot
        self.slots.assign(slot, held.loaded.prepared)
        return True

    def take_digests(self) -> list[str] | None:
        """See ``scheduling.admission.adapters.Adapters``."""
        digests = sorted(digest for digest, held in self._held.items() if not held.is_leaving)
        if digests == self._told:
            return None
        self._told = digests
        return list(digests)

    def _free_slot(self) -> int | None:
        """An empty slot, or that of the adapter used least lately, among those that nobody runs with."""
        if None in self._in_slots:
            return self._in_slots.index(None)
        idle = [held for held in self._in_slots if held is not None and not held.num_running and not held.is_pinned]
        return min(idle, key=lambda held: held.used).slot if idle else None

    @staticmethod
    def _may_go(held: HeldAdapter) -> bool:
        return not held.num_users and not held.is_pinned
