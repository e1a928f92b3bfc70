"""Requests that live as long as their caller listens: streamed, awaited, or with input chunk by chunk."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from typing import Unpack

from ...shared.deployment.records import ModelCard
from ...shared.messages.deltas import Delta
from ...shared.params.kinds import RequestOutputKind
from ...shared.params.sampling import SamplingParams
from ..inputs.options import RequestOptions
from ..inputs.prompt import Prompt
from ..inputs.streaming_input import GrowingPrompt, check_streamed, check_streamed_params
from ..requests.conversation import Conversation, answers
from ..requests.fan_out import merge
from ..requests.output_stream import collect, in_kind, outputs_of
from ..requests.queue_entry import Outgoing
from ..results import RequestOutput
from .core import ClientCore


class Generations(ClientCore):
    """The part of the client that generates text while the caller listens."""

    async def stream(
        self,
        prompt: Prompt | GrowingPrompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Delta]:
        """Generate from ``prompt`` and iterate over the output as it is produced.

        The subscription and the request are sent together. Tokens that are produced before the subscription are read
        from the log, so none can be missed.

        Delivery: ``delta.index`` counts output tokens from 0 and rises without gaps or repeats, whatever is lost or
        redelivered internally; the last delta carries ``finish_reason``.
        Several answers (``params.n``): their deltas are merged, ``delta.child`` is the answer of each, and the
        guarantees here hold per answer. An error of one answer is raised after the deltas that the other answers have
        so far; these are then cancelled.
        Streamed input: with an asynchronous iterable of chunks as ``prompt``, one request answers each chunk after all
        chunks before it, see ``converse``; a ``StreamingInput`` has its own parameters. An exception that the iterable
        raises cancels the request and is raised here unchanged.
        Cancellation: leaving the iterator early cancels the request; cancelling after the end does nothing.
        Back-pressure: deltas that wait for a slow consumer are merged, never dropped.
        Idempotency: a known ``request_id`` attaches to that request, if content and tenant are the same, and streams it
        from its first token; leaving such a stream cancels nothing.
        Death of this process: the request is cancelled ``lease_ttl_s`` later, unless another client listens to it.
        Redis unreachable: the stream waits without a limit, and then continues.

        Raises:
            ValidationError: an argument is wrong; nothing was enqueued (or the worker rejected the prompt as too long).
            RequestConflictError: the ``request_id`` belongs to a request with another content or tenant.
            UnknownModelError: no worker has ever served ``model`` here.
            QueueFullError: the model's or the tenant's backlog limit is reached; carries ``retry_after_s``.
            RedisFullError: Redis is out of memory; nothing was enqueued.
            QuotaExceededError: the tenant is over a quota, and its policy refuses requests; carries ``retry_after_s``.
            EngineDeadError: with ``fail_fast``, no live engine serves the model, or the last one died meanwhile.
            PoisonRequestError: ``max_deliveries`` engines died on this request; it is parked in the dead letter.
            RequestFailedError: the engine failed the request.
        """
        kind = _kind_of(params)
        if isinstance(prompt, AsyncIterable):
            streams = [answers(self.converse(params, **options), prompt)]
        else:
            streams = [self._requests.run(answer) for answer in await self._builder.build(prompt, params, options)]
        async with aclosing(merge([in_kind(stream, kind) for stream in streams])) as deltas:
            async for delta in deltas:
                yield delta

    async def stream_outputs(
        self,
        prompt: Prompt | GrowingPrompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput]:
        """Generate from ``prompt`` and iterate over ``RequestOutput``s, like ``generate`` of vLLM's AsyncLLM.

        ``params.output_kind`` selects the ``outputs`` of each item. ``DELTA``: the new part of one answer.
        ``CUMULATIVE``: one answer from its first token, whenever it has grown. ``FINAL_ONLY``: all answers, in a single
        item. In each kind the last output of an answer has its ``finish_reason``; only the last item is ``finished``
        and has the ``usage`` of all answers.

        Otherwise, and in the errors raised, like ``stream``.
        """
        kind = _kind_of(params)
        if isinstance(prompt, AsyncIterable):
            request_id = options.get("request_id") or os.urandom(16).hex()
            options["request_id"] = request_id
            model, n, output_prompt = (await self._builder.checked_card(options)).model, 1, None
            deltas = answers(self.converse(params, **options), prompt)
        else:
            outgoing = await self._builder.build(prompt, params, options)
            first, n, output_prompt = outgoing[0].request, len(outgoing), prompt
            model, request_id = first.model, first.request_id
            deltas = merge([self._requests.run(answer) for answer in outgoing])
        async with aclosing(outputs_of(deltas, kind, model, request_id, output_prompt, n=n)) as outputs:
            async for output in outputs:
                yield output

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> RequestOutput:
        """Generate from ``prompt`` and return the whole output. Cancelling the awaiting task cancels the request.

        Raises: as ``stream``.
        """
        outgoing = await self._builder.build(prompt, params, options)
        first = outgoing[0].request
        async with aclosing(merge([self._requests.run(answer) for answer in outgoing])) as deltas:
            return await collect(deltas, first.model, first.request_id, prompt, n=len(outgoing))

    def converse(self, params: SamplingParams | None = None, **options: Unpack[RequestOptions]) -> Conversation:
        """Return a request whose prompt grows chunk by chunk. Enter it with ``async with``; nothing is sent before.

        ``params`` apply to each chunk separately: its own ``max_tokens``, stop conditions and penalties. A chunk may
        override them: see ``Conversation.send``.

        Raises:
            UnsupportedParameterError: ``n`` > 1, ``prompt_logprobs`` or ``FINAL_ONLY``.
        """
        check_streamed_params(params)

        async def make_first(chunk: Prompt, own: SamplingParams | None) -> tuple[Outgoing, ModelCard]:
            card = await self._builder.checked_card(options)
            (outgoing,) = self._builder.outgoing(chunk, own, options, card)
            check_streamed(outgoing.request)
            outgoing.request.resumable = True
            return outgoing, card

        return Conversation(self._requests, make_first, params)


def _kind_of(params: SamplingParams | None) -> RequestOutputKind:
    return params.output_kind if isinstance(params, SamplingParams) else RequestOutputKind.DELTA
