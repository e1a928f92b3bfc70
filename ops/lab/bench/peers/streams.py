"""Requests as concurrent streams of one event loop, each sent at its arrival, with limited concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from peer_run import Request


async def follow_all(
    requests: list[Request], concurrency: int, stream: Callable[[Request], AsyncIterator[list[int]]]
) -> None:
    """Run all; ``stream`` sends one and yields its new tokens as they come."""
    room = asyncio.Semaphore(concurrency)
    loop = asyncio.get_running_loop()
    started = loop.time()

    async def one(request: Request) -> None:
        await asyncio.sleep(max(0.0, started + request.arrival_s - loop.time()))
        async with room:
            request.sent()
            async for token_ids in stream(request):
                request.saw(token_ids)

    await asyncio.gather(*(one(request) for request in requests))
