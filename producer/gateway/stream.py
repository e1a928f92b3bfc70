"""Write an answer as server-sent events: one write per delta, and an id on each event.

Clients send the id of the last event back as ``Last-Event-ID`` to resume a stream:

    chatcmpl-6921…:12          12 tokens of the only answer were sent
    chatcmpl-6921…:12e.7       two answers: the first ended after 12 tokens
    chatcmpl-6921…:12e.9e.u    the usage was sent too

An event carries at most one delta, so an id is always at the border of a delta. The deltas are in Redis, so any process
that has an id can tell which of them were sent, no matter which process sent them.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

import msgspec
from starlette.requests import Request

from ...shared.process.log import get_logger
from ...shared.values.json_lines import encode_line
from ..openai.answers.common import fingerprint_of
from ..openai.errors import OpenAIError, error_of
from ..openai.prepared import ChunkMaker, Prepared
from ..reconnect import AnswerPositions
from ..sse import COMMENT, EventStream
from .generations import PromptDelta
from .http import gateway_of
from .place import place_of

_FORM = re.compile(r"([A-Za-z0-9_-]{1,100}):(\d{1,10}e?(?:\.\d{1,10}e?)*)(\.u)?")

DONE = b"data: [DONE]\n\n"
log = get_logger(__name__)


class Position(AnswerPositions):
    """Position of one stream. Answers are numbered over all prompts: the ``n`` of the first, then the ``n`` of the
    second."""

    def __init__(
        self, response_id: str, next_indexes: list[int], ended: list[bool], *, has_usage: bool = False
    ) -> None:
        super().__init__(next_indexes, ended)
        self.response_id = response_id
        self.has_usage = has_usage

    @classmethod
    def start(cls, response_id: str, num_answers: int) -> Position:
        """Return the position of a stream that has sent nothing."""
        return cls(response_id, [0] * num_answers, [False] * num_answers)

    @classmethod
    def parse(cls, event_id: str, num_answers: int, id_prefix: str, fingerprint: str) -> Position:
        """Read the ``Last-Event-ID`` of a request whose body has ``num_answers`` answers and this ``fingerprint``.

        Raises:
            OpenAIError: 400, it is not the id of an event of such a stream, or another body started the stream.
        """
        match = _FORM.fullmatch(event_id)
        marks = match[2].split(".") if match else []
        is_valid = match is not None and len(marks) == num_answers
        response_id = check_stream_id(match[1] if match and is_valid else "", f"{id_prefix}-", fingerprint)
        assert match is not None
        ended = [mark.endswith("e") for mark in marks]
        return cls(response_id, [int(mark.rstrip("e")) for mark in marks], ended, has_usage=match[3] is not None)

    def __str__(self) -> str:
        if len(self.ended) == 1:
            marks = f"{self.next_indexes[0]}{'e' if self.ended[0] else ''}"
        else:
            marks = ".".join(
                f"{index}e" if ended else str(index) for index, ended in zip(self.next_indexes, self.ended, strict=True)
            )
        return f"{self.response_id}:{marks}{'.u' if self.has_usage else ''}"


def check_stream_id(response_id: str, prefix: str, fingerprint: str) -> str:
    """Return ``response_id``, which was part of a ``Last-Event-ID``, if a body with this ``fingerprint`` may resume it.

    Raises:
        OpenAIError: 400, it is not the id of such a stream, or another body started the stream.
    """
    if not response_id.startswith(prefix):
        raise _invalid_id("Last-Event-ID must be the id of an event of a stream that this same body started")
    if fingerprint_of(response_id) not in ("", fingerprint):
        raise _invalid_id(
            "Last-Event-ID belongs to a stream that another body started; send that body again unchanged, or omit the "
            "header"
        )
    return response_id


def _invalid_id(message: str) -> OpenAIError:
    return OpenAIError(400, message, param="Last-Event-ID", code="invalid_last_event_id")


async def events(
    deltas: AsyncGenerator[PromptDelta], prepared: Prepared, chunks: ChunkMaker, position: Position
) -> AsyncGenerator[bytes]:
    """Iterate over the encoded events of a stream that has reached ``position``; ends with [DONE].

    Deltas before ``position`` still pass through ``chunks``, because it keeps state, but are not sent again.
    """
    async with aclosing(deltas):
        with prepared.naming_fields():
            async for prompt, delta in deltas:
                answer = prompt * prepared.params.n + delta.child
                is_sent = position.has(answer, delta)
                chunk = chunks.feed(delta, prompt)
                if is_sent:
                    continue
                position.advance(answer, delta)
                if chunk is not None:
                    yield _event(position, chunk)
    usage = chunks.end()
    if usage is not None and not position.has_usage:
        position.has_usage = True
        yield _event(position, usage)
    yield DONE


def openai_error(error: OpenAIError) -> bytes:
    """Return the event that reports a failure where OpenAI's clients look for it, followed by the end of the stream."""
    return b"data: %b\n\n%b" % (encode_line(error.body), DONE)


async def event_stream(
    request: Request,
    encoded: AsyncGenerator[bytes],
    model: str,
    request_id: str,
    *,
    has_preamble: bool = False,
    error_event: Callable[[OpenAIError], bytes] = openai_error,
    keep_alive: bytes = COMMENT,
) -> EventStream:
    """Return the response of the events in ``encoded`` once its status is known.

    A refusal usually arrives quickly and gets its own status. After ``status_wait_s`` of the settings the head of the
    response is sent, with the place in the queue of a request that waits.

    Args:
        model, request_id: of the request in the queue.
        has_preamble: whether the first events come before the request has output.
        error_event: encodes a failure as the last event.
        keep_alive: sent while no event arrives.

    Raises: the exceptions of ``encoded`` before its first event.
    """
    place = place_of(request, model, request_id)
    return await EventStream(
        place.around(_observed(request, encoded), has_preamble=has_preamble),
        error_event=partial(_error_event, error_event),
        keep_alive_s=gateway_of(request).settings.keep_alive_s,
        keep_alive=keep_alive,
        status_wait_s=None,
    ).start()


def _event(position: Position, chunk: msgspec.Struct) -> bytes:
    return b"id: %b\ndata: %b\n\n" % (str(position).encode(), encode_line(chunk))


async def _observed(request: Request, encoded: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Iterate over the events. Record the time of the first one, and whether the reader disconnects before the end."""
    state = request.state
    async with aclosing(encoded):
        try:
            first = await anext(encoded)
            first_chunk = gateway_of(request).metrics.first_chunk.labels(state.route)
            first_chunk.observe(time.perf_counter() - state.started_at)
            yield first
            async for event in encoded:
                yield event
        except (GeneratorExit, asyncio.CancelledError):
            state.has_left = True
            raise


def _error_event(encode: Callable[[OpenAIError], bytes], error: Exception) -> bytes:
    api_error = error_of(error)
    log.warning("stream_failed", error=str(error), status=api_error.status)
    return encode(api_error)
