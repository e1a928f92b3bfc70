"""A backend of structured output that is loaded when the first request needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .grammar import Backend


class LazyBackend:
    """A backend that is loaded once, by the first thread that asks."""

    def __init__(self, load: Callable[[], Backend]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._backend: Backend | None = None

    def get(self) -> Backend:
        """Load it, or wait for the thread that does; what goes wrong is raised again each time."""
        with self._lock:
            if self._backend is None:
                self._backend = self._load()
            return self._backend
