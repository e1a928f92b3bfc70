"""The workload through the whole stack: client, Redis, worker process, engine core."""

from __future__ import annotations

import asyncio
import time

from .....producer import Client, SamplingParams
from ..result import PhaseResult
from ..workload import Item, Phase


async def run_served(url: str, phases: list[Phase]) -> list[PhaseResult]:
    """Stream every item of each phase in turn, from one client."""
    async with Client.connect(url) as client:
        return [await _run_phase(client, phase) for phase in phases]


async def _run_phase(client: Client, phase: Phase) -> PhaseResult:
    room = asyncio.Semaphore(phase.concurrency)
    outputs: list[list[int]] = [[] for _ in phase.items]
    token_times_s: list[list[float]] = [[] for _ in phase.items]
    sent_s = [0.0] * len(phase.items)
    started = time.perf_counter()

    async def one(index: int, item: Item) -> None:
        await asyncio.sleep(max(0.0, item.arrival_s - (time.perf_counter() - started)))
        async with room:
            sent_s[index] = max(item.arrival_s, time.perf_counter() - started)
            async for delta in client.stream(item.prompt_token_ids, SamplingParams(**item.sampling())):
                token_times_s[index] += [time.perf_counter() - started] * len(delta.token_ids)
                outputs[index] += delta.token_ids

    await asyncio.gather(*(one(i, item) for i, item in enumerate(phase.items)))
    return PhaseResult(
        name=phase.name,
        wall_s=time.perf_counter() - started,
        output_token_ids=outputs,
        token_times_s=token_times_s,
        sent_s=sent_s,
    )
