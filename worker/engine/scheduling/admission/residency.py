"""What the scheduler asks of whoever keeps adapters, before it lets a request run and when it runs no more."""

from __future__ import annotations

from typing import Protocol

from ..request import Request


class Residency(Protocol):
    """Adapters in slots; ``engine/adapters/library.py`` has it."""

    def hold(self, request: Request) -> bool:
        """Give the adapter of ``request`` a slot, if it has one, and ``request`` its number.

        False if others that run hold all slots: then it has to wait.
        """
        ...

    def let_go(self, request: Request) -> None:
        """``request`` runs no more, for now or, if it is finished, for good."""
        ...


class NoResidency:
    """No request has an adapter."""

    def hold(self, request: Request) -> bool:
        return True

    def let_go(self, request: Request) -> None:
        pass
