"""An answer as server-sent events: one write for each delta, an id on each event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from ...shared.json_lines import encode_line
from ...shared.log import get_logger
from ..openai.errors import error_of
from ..openai.prepared import ChunkMaker, Prepared
from ..sse import EventStream
from .event_ids import Position
from .generations import PromptDelta

DONE = b"data: [DONE]\n\n"

log = get_logger(__name__)


async def events(
    deltas: AsyncGenerator[PromptDelta], prepared: Prepared, chunks: ChunkMaker, position: Position
) -> AsyncGenerator[bytes]:
    """Iterate over the encoded events of a stream that stands at ``position``; ends with [DONE].

    What ``position`` has is fed to ``chunks`` all the same, for its state, and not told again.
    """
    async with aclosing(deltas):
        with prepared.naming_fields():
            async for prompt, delta in deltas:
                answer = prompt * prepared.params.n + delta.child
                is_told = position.has(answer, delta)
                chunk = chunks.feed(delta, prompt)
                if is_told:
                    continue
                position.advance(answer, delta)
                if chunk is not None:
                    yield _event(position, chunk)
    usage = chunks.end()
    if usage is not None and not position.has_usage:
        position.has_usage = True
        yield _event(position, usage)
    yield DONE


async def event_stream(
    encoded: AsyncGenerator[bytes],
    *,
    keep_alive_s: float,
    status_wait_s: float,
    on_first: Callable[[], None],
    on_left: Callable[[], None],
) -> EventStream:
    """Return the response of ``events``, once its status is known.

    Args:
        status_wait_s: a request that is refused is so within moments, with a status of its own; one that waits longer
            has its head sent.
        on_first: called before the first event goes out.
        on_left: called if the reader leaves before the end.

    Raises: what the events raise before the first of them.
    """
    return await EventStream(
        _noted(encoded, on_first, on_left),
        error_event=_error_event,
        keep_alive_s=keep_alive_s,
        status_wait_s=status_wait_s,
    ).start()


def _event(position: Position, chunk: msgspec.Struct) -> bytes:
    return b"id: %b\ndata: %b\n\n" % (str(position).encode(), encode_line(chunk))


async def _noted(
    encoded: AsyncGenerator[bytes], on_first: Callable[[], None], on_left: Callable[[], None]
) -> AsyncGenerator[bytes]:
    async with aclosing(encoded):
        try:
            first = await anext(encoded)
            on_first()
            yield first
            async for event in encoded:
                yield event
        except (GeneratorExit, asyncio.CancelledError):
            on_left()
            raise


def _error_event(error: Exception) -> bytes:
    """The event that tells a failure where OpenAI's clients look for it, and the end of the stream."""
    told = error_of(error)
    log.warning("stream_failed", error=str(error), status=told.status)
    return b"data: %b\n\n%b" % (encode_line(told.body), DONE)
