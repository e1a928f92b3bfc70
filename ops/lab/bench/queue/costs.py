"""Costs of a request, a delta and their storage in Redis, from which the size of a deployment is estimated.

Calls are as full as those of busy engines, and one client listens. CPU time is the server's own, so it does not depend
on the speed of the caller.
"""

from __future__ import annotations

import asyncio

import msgspec

from .....shared.broker import Broker, Claim, EngineCapacity, Entry, FinalRecord, Record
from .....shared.connection import CommandConnection, Subscriber
from .....shared.keys import Keys
from .....shared.messages.deltas import Delta
from .....shared.messages.outcome import FinishReason
from .....shared.redis_access.check import info_fields
from ....local.stack import private_redis
from .fleet import redis_cpu_s

NUM_REQUESTS = 2048
NUM_STREAMS = 64
DELTAS_PER_STREAM = 200
PAYLOAD = b"p" * 300
RESULT_TTL_MS = 600_000


class CostsRow(msgspec.Struct, kw_only=True):
    """CPU microseconds and bytes of Redis. A request is enqueued, claimed and ended, in calls of 64.

    A running request has logged ``tokens_per_stream`` tokens, as many to a delta as ``us_per_delta`` names.
    """

    us_per_request: float
    us_per_delta: dict[int, float]
    bytes_waiting: float
    bytes_running: float
    bytes_ended: float


def measure_costs() -> CostsRow:
    """Measure on a private Redis that writes its file every second."""
    with private_redis(append_only=True) as url:
        return asyncio.run(_measure_costs(url))


async def _measure_costs(url: str) -> CostsRow:
    commands, subscriber = CommandConnection(url), Subscriber(url)
    await subscriber.open()
    broker = Broker(commands, Keys().model("bench-costs"))
    try:
        us_per_delta = {tokens: await _deltas(broker, commands, subscriber, tokens) for tokens in (1, 4)}
        sizes = [await memory_bytes(commands)]
        cpu_s = await redis_cpu_s(commands)
        ids = [f"r{number}" for number in range(NUM_REQUESTS)]
        await enqueue_all(broker, ids)
        sizes.append(await memory_bytes(commands))
        claims = await claim_all(broker, len(ids))
        cpu_s -= await redis_cpu_s(commands)
        await _append(broker, claims, num_deltas=50, num_tokens=4)
        sizes.append(await memory_bytes(commands))
        cpu_s += await redis_cpu_s(commands)
        await finish_all(broker, claims, index=200)
        cpu_s -= await redis_cpu_s(commands)
        sizes.append(await memory_bytes(commands))
    finally:
        await subscriber.close()
        await commands.close()
    waiting, running, ended = ((size - sizes[0]) / NUM_REQUESTS for size in sizes[1:])
    return CostsRow(
        us_per_request=-1e6 * cpu_s / NUM_REQUESTS,
        us_per_delta=us_per_delta,
        bytes_waiting=waiting,
        bytes_running=running,
        bytes_ended=ended,
    )


async def _deltas(broker: Broker, commands: CommandConnection, subscriber: Subscriber, num_tokens: int) -> float:
    """Return the CPU microseconds of a delta with ``num_tokens``, in streams that one client listens to."""
    ids = [f"d{num_tokens}-{number}" for number in range(NUM_STREAMS)]
    listening = [await subscriber.subscribe(broker.keys.output(request_id), lambda _: None) for request_id in ids]
    await enqueue_all(broker, ids)
    claims = await claim_all(broker, NUM_STREAMS)
    before_s = await redis_cpu_s(commands)
    await _append(broker, claims, num_deltas=DELTAS_PER_STREAM, num_tokens=num_tokens)
    took_s = await redis_cpu_s(commands) - before_s
    await finish_all(broker, claims, index=DELTAS_PER_STREAM * num_tokens)
    for subscription in listening:
        subscriber.unsubscribe(subscription)
    return 1e6 * took_s / NUM_STREAMS / DELTAS_PER_STREAM


async def enqueue_all(broker: Broker, ids: list[str], at_once: int = NUM_STREAMS) -> None:
    for start in range(0, len(ids), at_once):
        await broker.enqueue_many(
            [
                Entry(
                    request_id=request_id,
                    payload=PAYLOAD,
                    result_ttl_ms=RESULT_TTL_MS,
                    num_prompt_tokens=100,
                    max_tokens=200,
                )
                for request_id in ids[start : start + at_once]
            ]
        )


async def claim_all(broker: Broker, number: int, at_once: int = NUM_STREAMS) -> list[Claim]:
    claims: list[Claim] = []
    while len(claims) < number:
        room = EngineCapacity(max_num_seqs=len(claims) + at_once, num_seqs=len(claims))
        claims += (await broker.claim("engine", room, lease_ttl_ms=RESULT_TTL_MS)).claims
    return claims


async def _append(broker: Broker, claims: list[Claim], *, num_deltas: int, num_tokens: int) -> None:
    for number in range(num_deltas):
        delta = Delta(index=number * num_tokens, token_ids=[5000] * num_tokens, text=" word" * num_tokens)
        for start in range(0, len(claims), NUM_STREAMS):
            part = claims[start : start + NUM_STREAMS]
            await broker.append([Record(claim.request_id, claim.epoch, delta) for claim in part])


async def finish_all(broker: Broker, claims: list[Claim], *, index: int, at_once: int = NUM_STREAMS) -> None:
    last = Delta(index=index, finish_reason=FinishReason.STOP)
    for start in range(0, len(claims), at_once):
        part = claims[start : start + at_once]
        await broker.finish([FinalRecord(claim.request_id, claim.epoch, last) for claim in part])


async def memory_bytes(commands: CommandConnection) -> int:
    """Return the size of the data in bytes."""
    return int(info_fields(await commands.execute("INFO", "memory"))["used_memory_dataset"])
