"""The other side of a client: an engine played through the broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from penstock.producer import Client, SamplingParams
from penstock.producer.gateway.app import build_app
from penstock.producer.gateway.settings import GatewaySettings
from penstock.shared.broker import Broker, Claim, EngineCapacity, FinalRecord, Record
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import DeathCause
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason

from ...processes import DEADLINE_S

# Of what takes no time on a quiet machine.
CAUSE = DeathCause(engine_id="e0", reason="killed by signal 9")


async def collect(client: Client, request_id: str) -> list[Delta]:
    return [delta async for delta in client.stream("hi", SamplingParams(), request_id=request_id)]


async def claim_one(broker: Broker) -> Claim:
    """Claim the next request, waiting for it to be enqueued."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            wave = (await broker.claim("e0", EngineCapacity(max_num_seqs=1))).claims
            if wave:
                return wave[0]
            await asyncio.sleep(0.005)  # a program that enqueues it may still have to start


async def write(
    broker: Broker,
    claim: Claim,
    index: int,
    *tokens: int,
    end: FinishReason | None = None,
    text: str | None = None,
) -> None:
    """``text`` is by default a character for each token; another text has no ends of tokens, as in release 0.1."""
    ends = [*range(1, len(tokens))] if text is None else []
    text = "".join(map(chr, tokens)) if text is None else text
    delta = Delta(index=index, token_ids=list(tokens), text=text, finish_reason=end, text_ends=ends)
    if end is None:
        assert await broker.append([Record(claim.request_id, claim.epoch, delta)]) == []
    else:
        assert await broker.finish([FinalRecord(claim.request_id, claim.epoch, delta)]) == []


async def until_followed(commands: CommandConnection, broker: Broker, *claims: Claim) -> None:
    """Wait until somebody listens to the channel of each."""
    channels = [broker.keys.output(claim.request_id) for claim in claims]
    async with asyncio.timeout(DEADLINE_S):
        while (await commands.execute("PUBSUB", "NUMSUB", *channels))[1::2] != [1] * len(channels):
            await asyncio.sleep(0)


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = DEADLINE_S) -> None:
    """Poll until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serve_gateway(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the gateway in this process; the block gets a client of it."""
    app = await asyncio.to_thread(build_app, GatewaySettings(**settings))  # it reads the version from the disk
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway", timeout=DEADLINE_S) as http,
    ):
        yield http


async def reap_for_ever(broker: Broker) -> None:
    """Reap as a supervisor does for one model, with short times."""
    while True:
        await broker.reap(CAUSE, max_deliveries=3, lease_ttl_ms=200)
        await asyncio.sleep(0.05)


def token_indexes(deltas: list[Delta]) -> list[int]:
    return [delta.index + k for delta in deltas for k in range(len(delta.token_ids))]
