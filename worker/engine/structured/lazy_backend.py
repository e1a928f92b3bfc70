"""A backend of structured output that is loaded when the first request needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .grammar import Backend


class LazyBackend:
    """A backend that the first calling thread loads once."""

    def __init__(self, load: Callable[[], Backend]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._backend: Backend | None = None

    def get(self) -> Backend:
        """Return the backend; load it, or wait for the thread that loads it. A failed load is repeated at each call."""
        with self._lock:
            if self._backend is None:
                self._backend = self._load()
            return self._backend
