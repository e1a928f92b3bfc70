"""Shares the places of a process between tenants, so that one tenant cannot take all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Places:
    """Counts who works in this process.

    While ``n`` tenants work, each has at most one part in ``n + 1`` of the places, so a further tenant finds some free.

    Args:
        num_places: how many can work at a time.
        max_per_tenant: an upper limit for one tenant, however few others work.
    """

    def __init__(self, num_places: int, max_per_tenant: int) -> None:
        self._num_places = num_places
        self._max_per_tenant = max_per_tenant
        self._working: Counter[str] = Counter()

    @contextmanager
    def take(self, tenant: str) -> Iterator[bool]:
        """Hold a place while inside; False if ``tenant`` has no free one."""
        num_tenants = len(self._working) + (tenant not in self._working)
        limit = max(1, min(self._max_per_tenant, self._num_places // (num_tenants + 1)))
        if self._working[tenant] >= limit or self._working.total() >= self._num_places:
            yield False
            return
        self._working[tenant] += 1
        try:
            yield True
        finally:
            self._working[tenant] -= 1
            if not self._working[tenant]:
                del self._working[tenant]
