"""Conversation: a request whose prompt grows. Each chunk is answered in the context of all before it, in one stream.

    send("a") ──▶ enqueue ──▶ ┐                        ┌ deltas …, the last with the end of segment 0
    send("b") ──▶ extend  ──▶ ├ one request in Redis ──┤ deltas …, the last with the end of segment 1
    close_input() ──────────▶ ┘                        └ the end of the request

To the broker it is an ordinary interactive request: it depends on the client's lease, and its log gives the earlier
answers to an engine that resumes it. Chunks are numbered, so a chunk that is sent again is not added twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from types import TracebackType

from ...shared.deployment.records import ModelCard
from ...shared.errors import ClientClosedError, InputClosedError, UnsupportedParameterError, ValidationError
from ...shared.messages.deltas import Delta
from ...shared.messages.requests import InputChunk
from ...shared.params.sampling import SamplingParams
from ..inputs.prompt import EmbedsArray, Prompt
from ..inputs.streaming_input import Chunk, GrowingPrompt, ParamsOfChunks, parts_of
from .queue_entry import Outgoing, num_chunk_tokens
from .single_requests import InteractiveDeltas, SingleRequests

FirstRequest = Callable[[Prompt, SamplingParams | None], Awaitable[tuple[Outgoing, ModelCard]]]


class Conversation:
    """A resumable request, created by ``Client.converse``: ``async with client.converse(params) as conversation:``.

    ``async for`` yields the deltas of all segments, and may be left and entered again. Leaving the block before the end
    of the request cancels it. One task may send while another reads.

    Args:
        make_first: returns the request of the first chunk and its parameters, and the card of its model.
        params: parameters of the answers to chunks that have none of their own.
    """

    def __init__(self, requests: SingleRequests, make_first: FirstRequest, params: SamplingParams | None) -> None:
        self._requests = requests
        self._make_first = make_first
        self._params = ParamsOfChunks(params)
        self._stack = AsyncExitStack()
        self._sending = asyncio.Lock()
        self._opened = asyncio.Event()
        self._outgoing: Outgoing | None = None
        self._card = ModelCard(model="")
        self._deltas: InteractiveDeltas | None = None
        self._num_chunks = 0
        self._is_left = False

    @property
    def request_id(self) -> str | None:
        """Id of the request, by which other clients find it; None before the first chunk."""
        return None if self._outgoing is None else self._outgoing.request.request_id

    async def send(self, chunk: Chunk, params: SamplingParams | None = None) -> None:
        """Add a chunk of text or token ids. Returns when it is in Redis.

        The first chunk enqueues the request; it may also be chat messages. Each text is tokenized separately, those
        after the first without special tokens. A cancelled call may have added its chunk: send the same chunk again, or
        leave.

        Args:
            params: parameters of the answer to this chunk only, instead of the conversation's; a ``StreamingInput`` has
                its own. A seed in them is used as it is; without one, randomness is derived from the conversation's.
                ``output_kind`` is always that of the conversation.

        Raises:
            ValidationError: the chunk is empty or neither text nor token ids; or ``params`` are wrong.
            UnsupportedParameterError: ``params`` have a parameter that streamed input does not support.
            InputClosedError: the request has ended, or ``close_input`` was called.
            PayloadTooLargeError: the input of the request would exceed its limit.
            and, for the first chunk: as ``Client.stream``.
        """
        async with self._sending:
            self._check_inside()
            prompt, own = parts_of(chunk, params)
            if self._outgoing is None:
                await self._open(prompt, self._params.first(own))
            else:
                await self._extend(self._outgoing, self._params.later(prompt, own, self._num_chunks, self._card))
            self._num_chunks += 1

    async def close_input(self) -> None:
        """Close the input: the request ends after its last segment.

        Raises:
            ValidationError: no chunk was sent, so no request exists.
        """
        async with self._sending:
            self._check_inside()
            if self._outgoing is None:
                raise ValidationError("the input must have at least one chunk: call send before close_input")
            request = self._outgoing.request
            broker = await self._requests.broker(request.model).find(request.request_id)
            await broker.input.close(request.request_id)

    async def segment(self) -> AsyncGenerator[Delta]:
        """Yield the deltas up to the next end of a segment: the rest of the answer to one chunk."""
        async for delta in self:
            yield delta
            if delta.segment_ends:
                return

    def fail(self, error: BaseException) -> None:
        """Make the stream raise ``error``."""
        if self._deltas is not None:
            self._deltas.fail(error)

    def __aiter__(self) -> Conversation:
        return self

    async def __anext__(self) -> Delta:
        await self._opened.wait()
        self._check_inside()
        assert self._deltas is not None
        return await anext(self._deltas)

    async def __aenter__(self) -> Conversation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_left = True
        self._opened.set()
        await self._stack.__aexit__(kind, error, trace)

    async def _open(self, first: Prompt, params: SamplingParams | None) -> None:
        if isinstance(first, EmbedsArray):
            raise UnsupportedParameterError("prompt embeddings are not supported with streamed input; send token ids")
        outgoing, self._card = await self._make_first(first, params)
        self._deltas = await self._stack.enter_async_context(self._requests.interactive(outgoing))
        self._outgoing = outgoing
        self._opened.set()

    async def _extend(self, outgoing: Outgoing, chunk: InputChunk) -> None:
        request = outgoing.request
        params = chunk.sampling_params or request.sampling_params
        max_tokens = 0 if params is None or params.max_tokens is None else params.max_tokens
        broker = await self._requests.broker(request.model).find(request.request_id)
        await broker.input.extend(
            request.request_id,
            self._num_chunks,
            chunk,
            num_prompt_tokens=num_chunk_tokens(chunk),
            max_tokens=max_tokens if not outgoing.max_model_len else min(max_tokens, outgoing.max_model_len),
        )

    def _check_inside(self) -> None:
        if self._is_left:
            raise ClientClosedError("the conversation was left; use it inside `async with client.converse(…)`")


async def answers(conversation: Conversation, chunks: GrowingPrompt) -> AsyncGenerator[Delta]:
    """Send all ``chunks`` and yield the deltas meanwhile. An exception of the iterator cancels the request."""
    rest = aiter(chunks)
    async with conversation:
        try:
            first = await anext(rest)
        except StopAsyncIteration:
            raise ValidationError("the iterator of chunks must give at least one") from None
        await conversation.send(first)
        sending = asyncio.create_task(_send_all(conversation, rest))
        try:
            async for delta in conversation:
                yield delta
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            if isinstance(rest, AsyncGenerator):
                await rest.aclose()


async def _send_all(conversation: Conversation, chunks: AsyncIterator[Chunk]) -> None:
    try:
        async for chunk in chunks:
            await conversation.send(chunk)
        await conversation.close_input()
    except InputClosedError:
        return  # the request has ended, and its stream says why
    except Exception as error:
        conversation.fail(error)
