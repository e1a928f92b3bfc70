"""What a fleet needs of a cluster: places for its agents, and calls to them."""

from __future__ import annotations

from typing import Protocol

from ...shared.errors import PenstockError


class AgentUnreachableError(PenstockError):
    """An agent does not answer: it is being started, its process or its host has died, or it hangs."""

    code = "agent_unreachable"
    retryable = True


class AgentGoneError(AgentUnreachableError):
    """An agent will never answer: it could not be made, and the cluster does not try again."""

    code = "agent_gone"
    retryable = False


class Place(Protocol):
    """An agent, where the cluster has put it or is going to. After a death the cluster starts it anew by itself."""

    async def status(self, timeout_s: float) -> bytes:
        """Return the agent's ``AgentStatus``.

        Raises:
            AgentUnreachableError: it has not answered in time, or there is none now.
            AgentGoneError: there will be none.
        """
        ...

    async def drain(self, drain_timeout_s: float, timeout_s: float) -> bytes:
        """As ``HostAgent.drain``. Raises as ``status``."""
        ...

    async def waits_for_room(self) -> bool:
        """Whether no host has room for it at present."""
        ...

    async def leave(self) -> None:
        """End the agent, and with it what it holds, and give back the room. Twice does nothing."""
        ...


class Ground(Protocol):
    """Where a fleet is.

    Attributes:
        name: for people.
        most: places that there can be; None where nobody knows.
    """

    @property
    def name(self) -> str: ...

    @property
    def most(self) -> int | None: ...

    async def place(self, spec: bytes) -> Place:
        """Ask for room for one agent, and for the agent in it; returns before there is any.

        Raises:
            AgentUnreachableError: the cluster itself is not there.
        """
        ...
