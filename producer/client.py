"""The asynchronous client: two connections to Redis, any number of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Generator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Unpack

from ..shared.broker import Queue
from ..shared.connection import RETRY_FOR_S, CommandConnection, Subscriber
from ..shared.control import Utility
from ..shared.errors import ClientClosedError, RequestNotFoundError, ValidationError
from ..shared.keys import DEFAULT_NAMESPACE, Keys
from ..shared.messages import Delta
from ..shared.params import RequestOutputKind, SamplingParams
from ..shared.records import ModelCard
from ..shared.redis_check import check_redis
from .conversation import Conversation, answers, check_streamed_params
from .engine_calls import CallRound
from .engine_control import A, CallOptions, EngineControl
from .engine_view import EngineView
from .fan_out import child_ids, children, merge
from .handle import RequestHandle
from .health import Health
from .lease import LEASE_TTL_S, ClientLease
from .model_cards import ModelCards
from .outgoing import Outgoing
from .outputs import RequestOutput
from .prompt import MAX_PAYLOAD_BYTES, Prompt, RequestOptions, build_request, check_flag, params_of_each
from .queue_control import QueueControl
from .reader import collect, in_kind
from .single_requests import FollowOptions, SingleRequests
from .text_calls import TextControl

RESULT_TTL_S = 3600.0


class Client(QueueControl, EngineControl, EngineView, TextControl):
    """Enqueue requests and stream or await their results.

    Use ``async with Client.connect(url) as client:`` (or ``client = await Client.connect(url)`` and ``close()``).
    One client serves any number of concurrent requests.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        model: default model; may be left out while exactly one is known to this Redis.
        tenant: on whose account requests are queued.
        result_ttl_s: how long the result of a request can be read after its end.
        wait_for_model: accept requests for a model that no worker has ever served; they wait for one.
            By default they raise ``UnknownModelError``, since the name is probably mistyped.
        fail_fast: whether requests for a model that no live engine serves, or whose last engine dies before they end,
            raise ``EngineDeadError``. By default they wait for an engine.
        lease_ttl_s: how long what this client streams or awaits outlives a death of its process.
        retry_for_s: how long a call waits for a Redis that is away, ``inf`` for ever. Streams wait without limit.
        namespace: prefix of all keys, as given to the workers.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        tenant: str = "default",
        result_ttl_s: float = RESULT_TTL_S,
        wait_for_model: bool = False,
        fail_fast: bool = False,
        lease_ttl_s: float = LEASE_TTL_S,
        retry_for_s: float = RETRY_FOR_S,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        namespace: str = DEFAULT_NAMESPACE,
    ) -> None:
        if not result_ttl_s > 0:
            raise ValidationError(f"result_ttl_s must be positive, got {result_ttl_s!r}")
        self._url = url
        self._tenant = tenant
        self._keys = Keys(namespace)
        self._commands = CommandConnection(url, retry_for_s=retry_for_s)
        self._subscriber = Subscriber(url)
        self._cards = ModelCards(self._commands, self._keys, default=model, wait_for_model=wait_for_model)
        self._health = Health(self._commands, self._keys)
        self._lease = ClientLease(lease_ttl_s)
        self._requests = SingleRequests(
            self._commands,
            self._subscriber,
            self._keys,
            self._health,
            self._lease,
            result_ttl_ms=max(1, int(result_ttl_s * 1000)),
            fail_fast=check_flag("fail_fast", fail_fast),
            max_payload_bytes=max_payload_bytes,
        )

    @classmethod
    def connect(cls, url: str, **options: Any) -> Client:
        """Return a client to be entered with ``async with`` or awaited; options are those of the class."""
        return cls(url, **options)

    def __await__(self) -> Generator[Any, None, Client]:
        return self.open().__await__()

    async def __aenter__(self) -> Client:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> Client:
        """Connect and check the server.

        Raises:
            ConfigurationError: the URL cannot be read.
            RedisUnavailableError: nothing answers there.
            RedisUnsupportedError: what answers is too old or lacks a command.
        """
        if self._requests.is_open:
            return self
        try:
            await check_redis(self._url, namespace=self._keys.namespace)
            await self._commands.open()
            await self._subscriber.open()
        except BaseException:
            await self._disconnect()
            raise
        self._requests.is_open = True
        return self

    async def close(self) -> None:
        """Cancel what this client streams or awaits, and disconnect. Detached requests run on."""
        if not self._requests.is_open:
            return
        self._requests.is_open = False
        await self._lease.close()
        await self._disconnect()

    async def stream(
        self,
        prompt: Prompt | AsyncIterable[Prompt],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Delta]:
        """Generate from ``prompt`` and iterate over the output as it is produced.

        Subscription and request are under way together; the log has what comes too early, so no token can be missed.

        Delivery: ``delta.index`` counts output tokens from 0 and rises without gaps or repeats, whatever was lost
        or redelivered underneath; the last delta carries ``finish_reason``.
        Several answers (``params.n``): their deltas come merged, ``delta.child`` says whose each is, and what is said
        here holds for each. An error of one is raised after what had come of the others, which are then cancelled.
        Streamed input: an asynchronous iterable of chunks as ``prompt`` is one request that answers
        each chunk after all before it, see ``converse``. An exception that it raises cancels the request.
        Cancellation: leaving the iterator early cancels the request; cancelling after the end does nothing.
        Back-pressure: deltas that wait for a slow consumer are merged, never dropped.
        Idempotency: a ``request_id`` that is known attaches to that request and streams it from its first token;
        leaving such a stream cancels nothing.
        Death of this process: the request is cancelled ``lease_ttl_s`` later, unless somebody else listens to it.
        Redis away: the stream waits for it, as long as it takes, and goes on.

        Raises:
            ValidationError: an argument is wrong; nothing was enqueued (or the worker found the prompt too long).
            UnknownModelError: no worker has ever served ``model`` here.
            QueueFullError: the model's or the tenant's backlog limit is reached; carries ``retry_after_s``.
            QuotaExceededError: the tenant is over a quota, and its policy refuses; carries ``retry_after_s``.
            EngineDeadError: with ``fail_fast``, no live engine serves the model, or the last one died meanwhile.
            PoisonRequestError: ``max_deliveries`` engines died on this request; it is parked in the dead letter.
            RequestFailedError: the engine failed the request.
        """
        kind = RequestOutputKind.DELTA if params is None else params.output_kind
        if isinstance(prompt, AsyncIterable):
            streams = [answers(self.converse(params, **options), prompt)]
        else:
            streams = [self._requests.run(one) for one in await self._build(prompt, params, options)]
        async with aclosing(merge([in_kind(stream, kind) for stream in streams])) as deltas:
            async for delta in deltas:
                yield delta

    def converse(self, params: SamplingParams | None = None, **options: Unpack[RequestOptions]) -> Conversation:
        """Return a request whose prompt grows chunk by chunk, to be entered with ``async with``; nothing is sent yet.

        ``params`` hold for each chunk: up to ``max_tokens`` output tokens, stop conditions and penalties of its own.

        Raises:
            UnsupportedParameterError: ``n`` > 1, ``prompt_logprobs`` or ``FINAL_ONLY``.
        """
        check_streamed_params(params)

        async def make_first(chunk: Prompt) -> tuple[Outgoing, ModelCard]:
            card = await self._checked_card(options)
            (outgoing,) = self._outgoing(chunk, params, options, card)
            outgoing.request.resumable = True
            return outgoing, card

        return Conversation(self._requests, make_first)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> RequestOutput:
        """Generate from ``prompt`` and return the whole output. Cancelling the awaiting task cancels the request.

        Raises: as ``stream``.
        """
        outgoing = await self._build(prompt, params, options)
        first = outgoing[0].request
        async with aclosing(merge([self._requests.run(one) for one in outgoing])) as deltas:
            return await collect(deltas, first.model, first.request_id, prompt, n=len(outgoing))

    async def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> RequestHandle:
        """Enqueue a detached request, which runs on without anyone listening, and return a handle on it.

        Raises: as ``stream``, before anything was enqueued.
        """
        outgoing = await self._build(prompt, params, options)
        await self._requests.submit(outgoing)
        first = outgoing[0].request
        return RequestHandle(self, first.model, first.request_id, prompt, n=len(outgoing))

    async def submit_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestHandle]:
        """Enqueue many detached requests at once, in order; ``params`` is one for all prompts or one each.

        If one is refused, those that were made are cancelled.

        Raises: as ``submit``; a ``request_id`` would be that of all, and is a ValidationError.
        """
        if options.get("request_id") is not None:
            raise ValidationError("submit_many takes no request_id: each request needs its own")
        each = params_of_each(params, len(prompts))
        card = await self._checked_card(options)
        built = [self._outgoing(p, chosen, options, card) for p, chosen in zip(prompts, each, strict=True)]
        if built:
            await self._requests.submit([one for outgoing in built for one in outgoing])
        return [
            RequestHandle(self, outgoing[0].request.model, outgoing[0].request.request_id, prompt, n=len(outgoing))
            for prompt, outgoing in zip(prompts, built, strict=True)
        ]

    async def handle(self, request_id: str, *, model: str | None = None, n: int = 1) -> RequestHandle:
        """Return a handle on a request enqueued earlier, here or elsewhere, with the ``n`` that it was given."""
        return RequestHandle(self, (await self._card(model)).model, request_id, n=n)

    async def cancel(self, request_id: str, *, model: str | None = None, n: int = 1) -> None:
        """End a request, all ``n`` answers, with finish_reason "cancelled", in any state; after its end does nothing.

        Raises:
            RequestNotFoundError: the request is unknown, or its result has expired.
        """
        card = await self._card(model)
        ids, broker = child_ids(request_id, n), self._requests.broker(card.model)
        for one, state in zip(ids, await asyncio.gather(*map(broker.cancel, ids)), strict=True):
            if state is None:
                raise RequestNotFoundError(f"request {one!r} of model {card.model!r} is unknown or has expired")

    async def models(self) -> dict[str, ModelCard]:
        """Return the models that workers have served on this Redis, by name."""
        self._check_open()
        return await self._cards.read()

    def follow(self, model: str, request_ids: Sequence[str], each: Sequence[FollowOptions]) -> AsyncGenerator[Delta]:
        """Iterate over the answers of a request that is already enqueued; see ``RequestHandle``."""
        self._check_open()
        pairs = zip(request_ids, each, strict=True)
        return merge([self._requests.follow(model, request_id, **options) for request_id, options in pairs])

    async def _build(self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions) -> list[Outgoing]:
        """Return the single requests to send, one per answer."""
        return self._outgoing(prompt, params, options, await self._checked_card(options))

    def _outgoing(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions, card: ModelCard
    ) -> list[Outgoing]:
        request = build_request(prompt, params, card=card, tenant=self._tenant, options=options)
        return [Outgoing(one, options, card.max_model_len) for one in children(request)]

    async def _checked_card(self, options: RequestOptions) -> ModelCard:
        unknown = options.keys() - RequestOptions.__annotations__.keys()
        if unknown:
            raise ValidationError(f"unknown request option {', '.join(sorted(unknown))}")
        return await self._card(options.get("model"))

    async def _queue(self, model: str | None) -> Queue:
        return Queue(self._commands, self._keys.model((await self._card(model)).model))

    async def _call_engines(self, call: Utility, kind: type[A], options: CallOptions) -> dict[str, A]:
        card = await self._card(options.get("model"))
        return await CallRound(self._commands, self._subscriber, self._keys, card.model, call, kind).run(options)

    async def _card(self, model: str | None) -> ModelCard:
        self._check_open()
        return await self._cards.find(model)

    def _check_open(self) -> None:
        if not self._requests.is_open:
            raise ClientClosedError("the client is not connected; use it inside `async with Client.connect(url)`")

    async def _disconnect(self) -> None:
        await self._subscriber.close()
        await self._commands.close()
