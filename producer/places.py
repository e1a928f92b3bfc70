"""Share the work slots of a process among tenants, so that one tenant cannot occupy all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class TenantSlots:
    """Counts the occupied slots of this process by tenant.

    While ``n`` tenants work, each has at most a share of one in ``n + 1`` of the slots, so another tenant finds a free
    slot.

    Args:
        num_slots: number of slots.
        max_per_tenant: upper limit for one tenant, however few others work.
    """

    def __init__(self, num_slots: int, max_per_tenant: int) -> None:
        self._num_slots = num_slots
        self._max_per_tenant = max_per_tenant
        self._working: Counter[str] = Counter()

    @contextmanager
    def occupy(self, tenant: str) -> Iterator[bool]:
        """Occupy a slot within the block. Yields False if ``tenant`` has no free slot."""
        num_tenants = len(self._working) + (tenant not in self._working)
        limit = max(1, min(self._max_per_tenant, self._num_slots // (num_tenants + 1)))
        if self._working[tenant] >= limit or self._working.total() >= self._num_slots:
            yield False
            return
        self._working[tenant] += 1
        try:
            yield True
        finally:
            self._working[tenant] -= 1
            if not self._working[tenant]:
                del self._working[tenant]
