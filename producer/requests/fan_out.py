"""Fan-out of a request for ``n`` answers: ``n`` requests at the broker, and one merged stream of their deltas.

Each child is an ordinary request with its own log, epoch, resume, cancellation and end, so every guarantee for one
request holds for each child. Child 0 has the id and the seed of the request. Child ``c`` has the id
``f"{request_id}~{c}"`` and a seed that is derived from the request's. So a repeated request with a seed gives the same
answers, and each answer equals that of a single request with the child's seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec

from ...shared.errors import ValidationError
from ...shared.messages.deltas import Delta
from ...shared.messages.requests import EngineCoreRequest
from ...shared.params.sampling import MAX_N, derived_seed
from ...shared.values.names import MAX_NAME_CHARS, check_name
from ...shared.values.shown import shown
from ..inputs.options import SEPARATOR, check_request_id, is_child_id


def child_ids(request_id: str, n: int) -> list[str]:
    """Return the ids under which the broker knows the children of a request.

    Raises:
        ValidationError: ``n`` is out of range, or the id is too long or is the id of a child. With ``n=1``, "x~2" is
            allowed and means child 2 of "x".
    """
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_N:
        raise ValidationError(f"n must be in [1, {MAX_N}], got {shown(n)}")
    check_name("request_id", request_id)
    if n > 1:
        check_request_id(request_id)
    return [request_id, *(check_name("request_id", f"{request_id}{SEPARATOR}{child}") for child in range(1, n))]


def possible_child_ids(request_id: str) -> list[str]:
    """Return all ids that the answers after the first may have, for a request whose ``n`` is unknown."""
    if is_child_id(request_id) or len(request_id) > MAX_NAME_CHARS - len(f"{SEPARATOR}{MAX_N - 1}"):
        return []
    return child_ids(request_id, MAX_N)[1:]


def children(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """Return the requests for one answer each that make up a request with a seed; the request itself if ``n`` is 1.

    Raises:
        ValidationError: as ``child_ids``.
    """
    params = request.sampling_params
    assert params is not None
    assert params.seed is not None
    if params.n == 1:
        return [request]
    return [
        msgspec.structs.replace(
            request,
            request_id=request_id,
            sampling_params=msgspec.structs.replace(
                params,
                n=1,
                seed=derived_seed(params.seed, child),
                prompt_logprobs=None if child else params.prompt_logprobs,
            ),
        )
        for child, request_id in enumerate(child_ids(request.request_id, params.n))
    ]


def merge(streams: Sequence[AsyncGenerator[Delta]]) -> AsyncGenerator[Delta]:
    """Return one stream of all deltas, each with its ``child``; see ``merged``."""
    return streams[0] if len(streams) == 1 else _with_children(streams)


async def _with_children(streams: Sequence[AsyncGenerator[Delta]]) -> AsyncGenerator[Delta]:
    async with aclosing(merged(streams)) as deltas:
        async for child, delta in deltas:
            delta.child = child
            yield delta


T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yield the items of all streams with the number of their stream, in order of arrival, until all have ended.

    An error of a stream is raised after the items that arrived before it. At the end all streams are closed, so each
    leaves its request as if it had been left alone. One item of each stream is read ahead of a slow caller. Further
    items wait in the streams, where deltas are merged.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    arrivals: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()
    was_taken = [asyncio.Event() for _ in streams]
    pumps = [asyncio.create_task(_pump(stream, i, arrivals, was_taken[i])) for i, stream in enumerate(streams)]
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
                was_taken[arrival[0]].set()
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
    """Forward the items of one stream, each after the previous one was taken."""
    async with aclosing(stream):
        async for item in stream:
            arrivals.put_nowait((number, item))
            await taken.wait()
            taken.clear()
