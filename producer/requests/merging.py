"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Iterate over the items of all, each with its stream's number, in the order of arrival; ends when all have.

    An error of one is raised after the items of all that had arrived before it. However it ends, all are closed: each
    leaves its request as its own early end would. Of each, one item is taken ahead of a slow caller; what else waits is
    in the streams, where deltas are merged.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    arrivals: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()
    taken = [asyncio.Event() for _ in streams]
    pumps = [asyncio.create_task(_pump(stream, i, arrivals, taken[i])) for i, stream in enumerate(streams)]
    for pump in pumps:
        pump.add_done_callback(arrivals.put_nowait)
    num_open = len(pumps)
    try:
        while num_open:
            arrival = await arrivals.get()
            if isinstance(arrival, asyncio.Task):
                arrival.result()
                num_open -= 1
            else:
                taken[arrival[0]].set()
                yield arrival
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    stream: AsyncGenerator[T],
    number: int,
    arrivals: asyncio.Queue[tuple[int, T] | asyncio.Task[None]],
    taken: asyncio.Event,
) -> None:
    """Hand on the items of one stream, the next one once the last was taken."""
    async with aclosing(stream):
        async for item in stream:
            arrivals.put_nowait((number, item))
            await taken.wait()
            taken.clear()
