"""A backend without a cluster: agents in this process, each with its real ``worker start``."""

from __future__ import annotations

import asyncio

from penstock.worker.fleet.agent import HostAgent
from penstock.worker.fleet.backend import AgentGoneError, AgentUnreachableError


class LocalBackend:
    """Stand-in for ``RayBackend`` with at most ``most`` places. With ``refuses`` set, it creates no agent."""

    name = "this process"

    def __init__(self, most: int | None = None, *, refuses: str = "") -> None:
        self.most = most
        self._refuses = refuses
        self.places: list[LocalPlace] = []

    async def place(self, spec: bytes) -> LocalPlace:
        made = None if self._refuses else await asyncio.to_thread(HostAgent, spec)
        self.places.append(LocalPlace(made, self._refuses))
        return self.places[-1]


class LocalPlace:
    def __init__(self, agent: HostAgent | None, refusal: str) -> None:
        self.agent = agent
        self._refusal = refusal

    async def status(self, timeout_s: float) -> bytes:
        return await asyncio.to_thread(self._there().status)

    async def drain(self, drain_timeout_s: float, timeout_s: float) -> bytes:
        return await asyncio.to_thread(self._there().drain, drain_timeout_s)

    async def is_pending(self) -> bool:
        return False

    async def leave(self) -> None:
        agent, self.agent = self.agent, None
        if agent is not None:
            # What the death of an actor does.
            assert agent._child.stdin is not None
            agent._child.stdin.close()
            await asyncio.to_thread(agent._child.wait, 240)

    def _there(self) -> HostAgent:
        if self._refusal:
            raise AgentGoneError(self._refusal)
        if self.agent is None:
            raise AgentUnreachableError("it has left")
        return self.agent
