"""The interface of a cluster: places for the agents of a fleet, and calls to them."""

from __future__ import annotations

from typing import Protocol

from ...shared.errors import PenstockError


class AgentUnreachableError(PenstockError):
    """An agent does not answer: it is starting, its process or its host has died, or it hangs."""

    code = "agent_unreachable"
    retryable = True


class AgentGoneError(AgentUnreachableError):
    """An agent will never answer: it could not be created, and the cluster does not retry."""

    code = "agent_gone"
    retryable = False


class Place(Protocol):
    """An agent at its current or future place in the cluster. The cluster restarts it after a death."""

    async def status(self, timeout_s: float) -> bytes:
        """Return the agent's ``AgentStatus``.

        Raises:
            AgentUnreachableError: the agent has not answered in time, or does not exist at present.
            AgentGoneError: the agent will never exist.
        """
        ...

    async def drain(self, drain_timeout_s: float, timeout_s: float) -> bytes:
        """Call ``HostAgent.drain``. Raises as ``status``."""
        ...

    async def is_pending(self) -> bool:
        """Return whether no host has capacity for the agent at present."""
        ...

    async def leave(self) -> None:
        """End the agent and its worker, and release their resources. A second call does nothing."""
        ...


class FleetBackend(Protocol):
    """The cluster that runs a fleet.

    Attributes:
        name: name for people.
        most: largest number of places; None if unknown.
    """

    @property
    def name(self) -> str: ...

    @property
    def most(self) -> int | None: ...

    async def place(self, spec: bytes) -> Place:
        """Request resources for one agent and start it in them. Returns before they are available.

        Raises:
            AgentUnreachableError: the cluster itself does not answer.
        """
        ...
