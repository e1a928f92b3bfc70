"""Cost of durability: a step's tokens appended to fenced logs and published, compared with publishing only.

Both sides do the work of a worker process for one step of a batch: encode a delta for each request and send them in
one round trip. The sides alternate, so that a drift of the machine's speed affects both.
"""

from __future__ import annotations

import statistics
import time
import uuid

import msgspec
import redis.asyncio

from .....shared.broker import Broker, EngineCapacity, Record
from .....shared.connection import CommandConnection
from .....shared.errors import ConfigurationError
from .....shared.keys import Keys
from .....shared.messages.deltas import Delta
from .....shared.redis_access.url import parse_pool

# Default number of requests of a step, as in the row of the engines.
BATCH_SIZE = 64
ROUNDS = 20
STEPS_PER_ROUND = 20
RESULT_TTL_MS = 60_000

_encoder = msgspec.msgpack.Encoder()


class DurabilityCost(msgspec.Struct, kw_only=True):
    """Medians over rounds, milliseconds per step of ``batch_size`` requests with one token each."""

    batch_size: int
    append_ms: float
    publish_ms: float

    def share_of(self, tokens_per_s: float | None) -> float | None:
        """Return the share of a step's time at a rate that logging and fencing add if they do not overlap with it.

        None without a rate.
        """
        if not tokens_per_s:
            return None
        return (self.append_ms - self.publish_ms) / 1000 * tokens_per_s / self.batch_size


async def durability_cost(url: str, batch_size: int = BATCH_SIZE) -> DurabilityCost:
    """Measure both sides in turn on the Redis at ``url``.

    Raises:
        ConfigurationError: there is no request in the batch, so nothing would be measured.
    """
    if batch_size < 1:
        raise ConfigurationError(f"batch_size must be at least 1, got {batch_size}")
    commands = CommandConnection(url)
    client = redis.asyncio.Redis.from_pool(parse_pool(url))
    broker = Broker(commands, Keys().model(f"bench-durability-{uuid.uuid4().hex[:8]}"))
    request_ids = [f"r{i}" for i in range(batch_size)]
    for request_id in request_ids:
        await broker.enqueue(request_id, b"-", result_ttl_ms=RESULT_TTL_MS)
    wave = await broker.claim("bench", EngineCapacity(max_num_seqs=batch_size))
    epochs = {claim.request_id: claim.epoch for claim in wave.claims}
    append_ms, publish_ms = [], []
    index = 0
    try:
        for _ in range(ROUNDS):
            started = time.perf_counter()
            for _ in range(STEPS_PER_ROUND):
                await broker.append([Record(id_, epochs[id_], _delta(index)) for id_ in request_ids])
                index += 1
            append_ms.append((time.perf_counter() - started) * 1000 / STEPS_PER_ROUND)
            started = time.perf_counter()
            for step in range(STEPS_PER_ROUND):
                async with client.pipeline(transaction=False) as pipeline:
                    for request_id in request_ids:
                        pipeline.publish(broker.keys.output(request_id), _encoder.encode(_delta(step)))
                    await pipeline.execute()
            publish_ms.append((time.perf_counter() - started) * 1000 / STEPS_PER_ROUND)
        for request_id in request_ids:
            await broker.cancel(request_id)
    finally:
        await client.aclose()
        await commands.close()
    return DurabilityCost(
        batch_size=batch_size, append_ms=statistics.median(append_ms), publish_ms=statistics.median(publish_ms)
    )


def _delta(index: int) -> Delta:
    return Delta(index=index, token_ids=[4711], text=" token")
