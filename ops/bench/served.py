"""The workload through the whole stack: client, Redis, worker process, engine core."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ...producer import Client, SamplingParams
from ..latency import StreamTimes
from .result import RunResult
from .workload import Item


async def run_served(url: str, items: list[Item], concurrency: int) -> RunResult:
    """Stream every item, ``concurrency`` at once, and return rates, latencies and the tokens."""
    room = asyncio.Semaphore(concurrency)
    outputs: list[list[int]] = [[] for _ in items]
    times: list[StreamTimes] = []

    async with Client.connect(url) as client:

        async def one(position: int, item: Item) -> None:
            async with room:
                clock = StreamTimes()
                times.append(clock)
                async for delta in client.stream(item.prompt_token_ids, SamplingParams(**item.sampling())):
                    clock.saw(len(delta.token_ids))
                    outputs[position] += delta.token_ids

        started = time.perf_counter()
        await asyncio.gather(*(one(i, item) for i, item in enumerate(items)))
        wall_s = time.perf_counter() - started
    return RunResult.of(wall_s, outputs, times)


async def enqueue_rates(url: str, num_requests: int) -> dict[str, float]:
    """Requests/s of ``submit`` with nobody consuming: one at a time, 32 tasks, all at once."""
    params = SamplingParams(max_tokens=16)
    rates: dict[str, float] = {}

    async def submit_all(client: Client, count: int, room: asyncio.Semaphore) -> float:
        async def one() -> Any:
            async with room:
                await client.submit("four hundred seven plus thirteen is", params)

        started = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(count)))
        return count / (time.perf_counter() - started)

    async with Client.connect(url, model="bench-enqueue", wait_for_model=True, result_ttl_s=60) as client:
        for name, limit, count in (
            ("one at a time", 1, num_requests // 10),
            ("32 tasks", 32, num_requests),
            ("all at once", num_requests, num_requests),
        ):
            rates[name] = await submit_all(client, count, asyncio.Semaphore(limit))
    return rates
