"""Effect of a tenant that floods a model on a tenant with few requests.

The real stack runs with the engine's default options, but without prefix caching. The tenant "small" sends occasional
requests: alone; with a backlog of a hundred times as many requests of the tenant "flood"; and, for comparison, with
the same backlog of its own, as under first come, first served. Rounds alone and with the flood alternate, and the ratio
of each pair's p99 is computed.

A time to first token is split at the claim, by the server's time: before it the request waits for its turn and for a
free sequence of the engine, after it for the current step, its own prefill and the reply. The time between small's
tokens is that of a step with the whole batch.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import uuid
from random import Random

import msgspec
import redis.asyncio

from .....producer import Client, SamplingParams
from .....shared.keys import Keys
from .....shared.redis_access.url import parse_pool
from ....demo.run import MODEL
from ....local.stack import LocalStack
from ....statistics import StreamTimes, percentile
from ..workload import Item, make_workload

NUM_SMALL = 40
FLOOD_FACTOR = 100
SEND_EVERY_S = 0.25
PROMPT_TOKENS = (40, 60)
OUTPUT_TOKENS = (8, 24)
TIMEOUT_S = 300.0
POLL_S = 0.02


class Feel(msgspec.Struct, kw_only=True):
    """Latencies of small's requests in one kind of round, in milliseconds, over all rounds.

    ``num_other_started`` counts the flood's requests that started meanwhile, ``min_backlog`` is the least number of its
    waiting requests at the end of a round.
    """

    num_requests: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    to_claim_p50_ms: float
    to_claim_p99_ms: float
    claim_to_token_p50_ms: float
    claim_to_token_p99_ms: float
    between_tokens_p50_ms: float
    between_tokens_p99_ms: float
    wall_s: float
    num_other_started: int = 0
    min_backlog: int = 0


class FairnessRow(msgspec.Struct, kw_only=True):
    """Ratios are flooded over alone, the median of the rounds' ratios."""

    rounds: int
    flood_factor: int
    alone: Feel
    flooded: Feel
    one_tenant: Feel
    p50_ratio: float
    p99_ratio: float
    p99_ratios: list[float]


class _Round:
    """Clocks of the requests of one round."""

    def __init__(self) -> None:
        self.ttft_ms: list[float] = []
        self.to_claim_ms: list[float] = []
        self.between_ms: list[float] = []
        self.wall_s = 0.0
        self.num_other_started = 0
        self.backlog = 0


def measure_fairness(rounds: int = 3, seed: int = 0, worker_options: tuple[str, ...] = ()) -> FairnessRow:
    """Run all rounds on one engine of the demo model."""
    options = ["--device", "cpu", "--served-model-name", "demo", "--log-level", "error", *worker_options]
    options.append("--no-enable-prefix-caching")  # every round sends the same prompts
    with LocalStack(MODEL, options) as stack:
        return asyncio.run(_measure_fairness(stack.url, rounds, seed))


async def _measure_fairness(url: str, rounds: int, seed: int) -> FairnessRow:
    vocab_size = json.loads((MODEL / "config.json").read_text())["vocab_size"]

    def work(count: int, seed: int) -> list[Item]:
        return make_workload(count, vocab_size, seed, prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS)

    small, flood = work(NUM_SMALL, seed), work(NUM_SMALL * FLOOD_FACTOR, seed + 1)
    alone: list[_Round] = []
    flooded: list[_Round] = []
    server = redis.asyncio.Redis.from_pool(parse_pool(url))
    try:
        async with Client.connect(url, model="demo") as client:
            await _round(client, server, small[:4], [], "flood")
            for _ in range(rounds):
                alone.append(await _round(client, server, small, [], "flood"))
                flooded.append(await _round(client, server, small, flood, "flood"))
            one_tenant = [await _round(client, server, small, flood, "small")]
    finally:
        await server.aclose()
    ratios = {
        share: [
            percentile(b.ttft_ms, share) / percentile(a.ttft_ms, share) for a, b in zip(alone, flooded, strict=True)
        ]
        for share in (0.5, 0.99)
    }
    return FairnessRow(
        rounds=rounds,
        flood_factor=FLOOD_FACTOR,
        alone=_feel(alone),
        flooded=_feel(flooded),
        one_tenant=_feel(one_tenant),
        p50_ratio=statistics.median(ratios[0.5]),
        p99_ratio=statistics.median(ratios[0.99]),
        p99_ratios=ratios[0.99],
    )


async def _round(
    client: Client, server: redis.asyncio.Redis, small: list[Item], flood: list[Item], flood_tenant: str
) -> _Round:
    """Run small's requests at their times, with an existing backlog."""
    result = _Round()
    if flood:
        prompts, params = [item.prompt_token_ids for item in flood], [SamplingParams(**i.sampling()) for i in flood]
        await client.submit_many(prompts, params, tenant=flood_tenant)
        await _until_busy(client)
    depth = await _depth(client, flood_tenant)
    started = time.perf_counter()
    jitter = Random(0)
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as sending:
        for number, item in enumerate(small):
            sending.create_task(_send_item(client, server, item, result))
            # Not in step with the engine.
            at = started + SEND_EVERY_S * (number + jitter.uniform(0.8, 1.2))
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
    result.wall_s = time.perf_counter() - started
    result.backlog = await _depth(client, flood_tenant)
    result.num_other_started = depth - result.backlog
    await client.purge(flood_tenant)
    await _until_idle(client)
    return result


async def _send_item(client: Client, server: redis.asyncio.Redis, item: Item, result: _Round) -> None:
    request_id = uuid.uuid4().hex
    sent_at_ms = time.time() * 1000
    clock = StreamTimes()
    params = SamplingParams(**item.sampling())
    async for delta in client.stream(item.prompt_token_ids, params, tenant="small", request_id=request_id):
        clock.saw(len(delta.token_ids))
    claimed_at_ms = await server.hget(Keys().model("demo").request(request_id), "charged_at")  # type: ignore[misc]  # redis-py's annotation is of both clients
    assert clock.ttft_s is not None
    assert claimed_at_ms is not None
    result.ttft_ms.append(clock.ttft_s * 1000)
    # The server cuts its clock to whole milliseconds: half of one on the average.
    result.to_claim_ms.append(max(0.0, float(claimed_at_ms) + 0.5 - sent_at_ms))
    result.between_ms += [gap * 1000 for gap in clock.itl_s]


async def _depth(client: Client, tenant: str) -> int:
    stats = await client.queue_stats(tenants=True)
    return sum(found.depth for found in stats.tenants if found.tenant == tenant)


async def _until_busy(client: Client) -> None:
    """Until the engine has been full for long enough that its sequences no longer started together."""
    async with asyncio.timeout(TIMEOUT_S):
        first = (await client.queue_stats(tenants=False)).depth
        full = 4 * (await client.queue_stats(tenants=False)).num_running
        while True:
            stats = await client.queue_stats(tenants=False)
            full = max(full, 4 * stats.num_running)
            if full and first - stats.depth > full:
                return
            await asyncio.sleep(POLL_S)


async def _until_idle(client: Client) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            stats = await client.queue_stats(tenants=False)
            if stats.num_running + stats.depth == 0:
                return
            await asyncio.sleep(POLL_S)


def _feel(rounds: list[_Round]) -> Feel:
    ttft = [ms for one in rounds for ms in one.ttft_ms]
    to_claim = [ms for one in rounds for ms in one.to_claim_ms]
    between = [ms for one in rounds for ms in one.between_ms]
    after = [whole - before for whole, before in zip(ttft, to_claim, strict=True)]
    return Feel(
        num_requests=len(ttft),
        ttft_p50_ms=percentile(ttft, 0.5),
        ttft_p99_ms=percentile(ttft, 0.99),
        to_claim_p50_ms=percentile(to_claim, 0.5),
        to_claim_p99_ms=percentile(to_claim, 0.99),
        claim_to_token_p50_ms=percentile(after, 0.5),
        claim_to_token_p99_ms=percentile(after, 0.99),
        between_tokens_p50_ms=percentile(between, 0.5),
        between_tokens_p99_ms=percentile(between, 0.99),
        wall_s=sum(one.wall_s for one in rounds),
        num_other_started=sum(one.num_other_started for one in rounds),
        min_backlog=min(one.backlog for one in rounds),
    )
