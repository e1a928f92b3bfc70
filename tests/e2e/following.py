"""Streams that are followed while engines are controlled, and the engines' own reports."""

from __future__ import annotations

import asyncio

from penstock.producer import Client, Delta, SamplingParams
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.presence import read_heartbeats
from penstock.shared.deployment.records import EngineHeartbeat
from penstock.shared.keys import Keys
from penstock.shared.messages.supervision import EngineState

from ..gate import Gate
from ..processes import DEADLINE_S

PROMPT = "count from four to nine:"
NUM_TOKENS = 200
LONG = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


class Following:
    """A stream that is read in the background, and its deltas; it cannot end before ``check``."""

    def __init__(self, client: Client, gate: Gate) -> None:
        gate.hold_at(NUM_TOKENS - 1)
        self._gate = gate
        self.deltas: list[Delta] = []
        self.task = asyncio.create_task(self._follow(client))

    async def _follow(self, client: Client) -> None:
        async for delta in client.stream(PROMPT, LONG):
            self.deltas.append(delta)  # the test looks at them meanwhile

    @property
    def num_tokens(self) -> int:
        return self.deltas[-1].next_index if self.deltas else 0

    async def under_way(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.num_tokens < 5:
                await asyncio.sleep(0.005)

    async def check(self, token_ids: list[int]) -> None:
        """Every token has come once, in order, and they are these; all may go on."""
        self._gate.open()
        async with asyncio.timeout(DEADLINE_S):
            await self.task
        assert [delta.index + i for delta in self.deltas for i in range(len(delta.token_ids))] == list(
            range(len(token_ids))
        )
        assert [token_id for delta in self.deltas for token_id in delta.token_ids] == token_ids
        assert [delta.finish_reason for delta in self.deltas if delta.finished] == ["length"]


async def short(client: Client) -> list[int]:
    return list((await client.generate(PROMPT, SHORT)).outputs[0].token_ids)


async def beats(url: str) -> dict[str, EngineHeartbeat]:
    commands = CommandConnection(url)
    try:
        return {beat.engine_id: beat for beat in await read_heartbeats(commands.execute, Keys())}
    finally:
        await commands.close()


async def states(url: str) -> dict[str, EngineState]:
    return {engine_id: beat.state for engine_id, beat in (await beats(url)).items()}
