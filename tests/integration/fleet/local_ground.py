"""A ground without a cluster: agents in this process, each with its real ``worker start``."""

from __future__ import annotations

import asyncio

from penstock.worker.fleet.agent import HostAgent
from penstock.worker.fleet.ground import AgentUnreachableError


class LocalGround:
    """As ``RayGround``; ``most`` places at once."""

    name = "this process"

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.places: list[LocalPlace] = []

    async def place(self, spec: bytes) -> LocalPlace:
        self.places.append(LocalPlace(await asyncio.to_thread(HostAgent, spec)))
        return self.places[-1]


class LocalPlace:
    def __init__(self, agent: HostAgent) -> None:
        self.agent: HostAgent | None = agent

    async def status(self, timeout_s: float) -> bytes:
        return await asyncio.to_thread(self._there().status)

    async def drain(self, drain_timeout_s: float, timeout_s: float) -> bytes:
        return await asyncio.to_thread(self._there().drain, drain_timeout_s)

    async def waits_for_room(self) -> bool:
        return False

    async def leave(self) -> None:
        agent, self.agent = self.agent, None
        if agent is not None:
            # What the death of an actor does.
            assert agent._child.stdin is not None
            agent._child.stdin.close()
            await asyncio.to_thread(agent._child.wait, 60)

    def _there(self) -> HostAgent:
        if self.agent is None:
            raise AgentUnreachableError("it has left")
        return self.agent
