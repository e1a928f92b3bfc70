"""Engines as the broker sees them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from penstock.shared.broker import Broker, Claim, EngineCapacity, Wave

from .conftest import die, enqueue, finish_with

# How long an engine leaves a request to others that have more room.
PATIENCE_S = 0.1


@dataclass
class Engine:
    """Holds what it claims, with so much of its cache as was reckoned, until it is told to end it."""

    broker: Broker
    name: str
    max_num_seqs: int = 1000
    num_kv_tokens: int = 2**40
    held: list[Claim] = field(default_factory=list)

    @property
    def num_held_kv_tokens(self) -> int:
        return sum(claim.num_kv_tokens for claim in self.held)

    async def look(self) -> Wave:
        room = EngineCapacity(
            max_num_seqs=self.max_num_seqs,
            num_seqs=len(self.held),
            num_kv_tokens=self.num_kv_tokens,
            num_held_kv_tokens=self.num_held_kv_tokens,
        )
        wave = await self.broker.claim(self.name, room)
        self.held += wave.claims
        return wave

    async def claim(self) -> list[str]:
        return [claim.request_id for claim in (await self.look()).claims]

    async def end(self, *request_ids: str, num_output: int = 1) -> None:
        for claim in [claim for claim in self.held if claim.request_id in request_ids]:
            self.held.remove(claim)
            await finish_with(self.broker, claim, num_output=num_output)


async def teach(broker: Broker, num_output: int) -> None:
    """Let the broker expect so many output tokens of a request."""
    await enqueue(broker, "teacher")
    engine = Engine(broker, "teaching")
    await engine.claim()
    await engine.end("teacher", num_output=num_output)
    await die(broker, "teaching", external=True)


async def small(broker: Broker, *request_ids: str, **options) -> None:
    """Requests that take 10 tokens of cache each."""
    await enqueue(broker, *request_ids, num_prompt_tokens=9, max_tokens=1, **options)


async def large(broker: Broker, *request_ids: str, **options) -> None:
    """Requests that take 80 tokens of cache each."""
    await enqueue(broker, *request_ids, num_prompt_tokens=79, max_tokens=1, **options)


async def pass_patience() -> None:
    """Wait until what came before is anybody's."""
    passed_at = time.monotonic() + PATIENCE_S
    while time.monotonic() <= passed_at:
        await asyncio.sleep(0.01)
