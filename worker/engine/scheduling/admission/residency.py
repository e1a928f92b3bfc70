"""Interface through which the scheduler reserves an adapter slot while a request runs."""

from __future__ import annotations

from typing import Protocol

from ..request import Request


class Residency(Protocol):
    """Adapters in slots; implemented by ``engine/adapters/library.py``."""

    def acquire_slot(self, request: Request) -> bool:
        """Reserve a slot for the adapter of ``request``, if it has one, and set ``request.lora_index``.

        Return False if other running requests hold all slots: then ``request`` must wait.
        """
        ...

    def release_slot(self, request: Request) -> None:
        """Release the slot of ``request``, which was preempted or has finished."""
        ...


class NoResidency:
    """Admits every request, since none has an adapter."""

    def acquire_slot(self, request: Request) -> bool:
        return True

    def release_slot(self, request: Request) -> None:
        pass
