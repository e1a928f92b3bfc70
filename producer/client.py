"""The asynchronous client: two connections to Redis, any number of requests."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Unpack

from ..shared.broker import NEW, UNSERVED, Broker
from ..shared.connection import RETRY_FOR_S, CommandConnection, Subscriber
from ..shared.errors import ClientClosedError, EngineDeadError, RequestNotFoundError, ValidationError
from ..shared.keys import DEFAULT_NAMESPACE, Keys
from ..shared.messages import Delta, EngineCoreRequest
from ..shared.params import SamplingParams
from ..shared.records import ModelCard
from ..shared.redis_check import check_redis
from .handle import RequestHandle
from .health import Health
from .lease import LEASE_TTL_S, ClientLease, InteractiveRequest
from .model_cards import ModelCards
from .outputs import RequestOutput
from .prompt import MAX_PAYLOAD_BYTES, Prompt, RequestOptions, build_request, check_flag, encode_request
from .reader import DeltaReader, checked, collect, in_kind

RESULT_TTL_S = 3600.0


class Client:
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
        self._result_ttl_ms = max(1, int(result_ttl_s * 1000))
        self._fail_fast = check_flag("fail_fast", fail_fast)
        self._max_payload_bytes = max_payload_bytes
        self._keys = Keys(namespace)
        self._commands = CommandConnection(url, retry_for_s=retry_for_s)
        self._subscriber = Subscriber(url)
        self._cards = ModelCards(self._commands, self._keys, default=model, wait_for_model=wait_for_model)
        self._health = Health(self._commands, self._keys)
        self._lease = ClientLease(lease_ttl_s)
        self._brokers: dict[str, Broker] = {}
        self._open = False

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
        if self._open:
            return self
        try:
            await check_redis(self._url, namespace=self._keys.namespace)
            await self._commands.open()
            await self._subscriber.open()
        except BaseException:
            await self._disconnect()
            raise
        self._open = True
        return self

    async def close(self) -> None:
        """Cancel what this client streams or awaits, and disconnect. Detached requests run on."""
        if not self._open:
            return
        self._open = False
        await self._lease.close()
        await self._disconnect()

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[Delta]:
        """Generate from ``prompt`` and iterate over the output as it is produced.

        The subscription is confirmed before the request enters the stream, so no token can be missed.

        Delivery: ``delta.index`` counts output tokens from 0 and rises without gaps or repeats, whatever was lost
        or redelivered underneath; the last delta carries ``finish_reason``.
        Cancellation: leaving the iterator early cancels the request; cancelling after the end does nothing.
        Back-pressure: deltas that wait for a slow consumer are merged, never dropped.
        Idempotency: a ``request_id`` that is known attaches to that request and streams it from its first token;
        leaving such a stream cancels nothing.
        Death of this process: the request is cancelled ``lease_ttl_s`` later, unless somebody else listens to it.
        Redis away: the stream waits for it, as long as it takes, and goes on.

        Raises:
            ValidationError: an argument is wrong; nothing was enqueued (or the worker found the prompt too long).
            UnknownModelError: no worker has ever served ``model`` here.
            EngineDeadError: with ``fail_fast``, no live engine serves the model, or the last one died meanwhile.
            PoisonRequestError: ``max_deliveries`` engines died on this request; it is parked in the dead letter.
            RequestFailedError: the engine failed the request.
        """
        request = await self._build(prompt, params, options)
        assert request.sampling_params is not None
        async with aclosing(self._run(request, options)) as deltas:
            async for delta in in_kind(deltas, request.sampling_params.output_kind):
                yield delta

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> RequestOutput:
        """Generate from ``prompt`` and return the whole output. Cancelling the awaiting task cancels the request.

        Raises: as ``stream``.
        """
        request = await self._build(prompt, params, options)
        async with aclosing(self._run(request, options)) as deltas:
            return await collect(deltas, request.model, request.request_id, prompt)

    async def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> RequestHandle:
        """Enqueue a detached request, which runs on without anyone listening, and return a handle on it.

        Raises: as ``stream``, before anything was enqueued.
        """
        request = await self._build(prompt, params, options)
        with self._health.watching(request.model):
            await self._enqueue(request, options)
        return RequestHandle(self, request.model, request.request_id, prompt)

    async def handle(self, request_id: str, *, model: str | None = None) -> RequestHandle:
        """Return a handle on a request enqueued earlier, here or elsewhere."""
        return RequestHandle(self, (await self._card(model)).model, request_id)

    async def cancel(self, request_id: str, *, model: str | None = None) -> None:
        """End a request with finish_reason "cancelled", in any state; after its end this does nothing.

        Raises:
            RequestNotFoundError: the request is unknown, or its result has expired.
        """
        card = await self._card(model)
        if await self._broker(card.model).cancel(request_id) is None:
            raise RequestNotFoundError(f"request {request_id!r} of model {card.model!r} is unknown or has expired")

    async def models(self) -> dict[str, ModelCard]:
        """Return the models that workers have served on this Redis, by name."""
        self._check_open()
        return await self._cards.read()

    async def follow(self, model: str, request_id: str, after: int = -1) -> AsyncGenerator[Delta]:
        """Iterate over the deltas of a request that is already enqueued; see ``RequestHandle.stream``."""
        self._check_open()
        reader = DeltaReader(self._broker(model), self._subscriber, request_id, after)
        try:
            await reader.subscribe()
            reader.catch_up()
            with self._health.watching(model):
                async for delta in checked(reader):
                    yield delta
        finally:
            reader.close()

    async def check_health(self, model: str | None = None) -> None:
        """Return if a live engine serves the model, by the heartbeats of this moment.

        An engine that is ready, busy, compiling, draining or sleeping is live; a starting, stalled or dead one is not.

        Raises:
            EngineDeadError: there is none; names each engine that is known and its cause.
            UnknownModelError: no worker has ever served ``model`` here.
        """
        await self._health.check((await self._card(model)).model)

    @property
    def errored(self) -> bool:
        """Whether this client last saw that nobody serves a model it uses; asks nobody.

        Kept by ``check_health`` and by every ``EngineDeadError`` that a request of this client met; ended by a
        ``check_health`` that returns and by a new token of a request for that model.
        """
        return self._health.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """The newest error behind ``errored``; one that says so if there is none."""
        return self._health.dead_error or EngineDeadError("no engine is known to be dead")

    @property
    def is_running(self) -> bool:
        """Whether the client is connected and not ``errored``."""
        return self._open and not self.errored

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    def _broker(self, model: str) -> Broker:
        broker = self._brokers.get(model)
        if broker is None:
            broker = self._brokers[model] = Broker(self._commands, self._keys.model(model))
        return broker

    async def _build(self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions) -> EngineCoreRequest:
        unknown = options.keys() - RequestOptions.__annotations__.keys()
        if unknown:
            raise ValidationError(f"unknown request option {', '.join(sorted(unknown))}")
        card = await self._card(options.get("model"))
        return build_request(prompt, params, card=card, tenant=self._tenant, options=options)

    async def _run(self, request: EngineCoreRequest, options: RequestOptions) -> AsyncGenerator[Delta]:
        """Enqueue an interactive request and follow it; leaving early cancels it."""
        broker = self._broker(request.model)
        reader = DeltaReader(broker, self._subscriber, request.request_id)
        interactive: InteractiveRequest | None = None
        try:
            await reader.subscribe()
            enqueueing = asyncio.create_task(self._enqueue(request, options, client_id=self._lease.client_id))
            interactive = InteractiveRequest(broker, request.request_id, enqueueing)
            self._lease.hold(interactive)
            with self._health.watching(request.model):
                is_ours = await interactive.is_ours()
                if not is_ours:
                    self._lease.let_go(interactive)
                    reader.catch_up()
                async for delta in checked(reader):
                    if is_ours and delta.token_ids:
                        self._health.saw_alive(request.model)
                    yield delta
        finally:
            reader.close()
            if interactive is not None:
                if not reader.ended and self._open:
                    await interactive.leave()
                self._lease.let_go(interactive)

    async def _enqueue(self, request: EngineCoreRequest, options: RequestOptions, *, client_id: str = "") -> bool:
        """Enqueue a request, detached without a ``client_id``; returns whether it is new, or its id was known."""
        fail_fast = options.get("fail_fast")
        state = await self._broker(request.model).enqueue(
            request.request_id,
            encode_request(request, self._max_payload_bytes),
            result_ttl_ms=self._result_ttl_ms,
            client_id=client_id,
            client_ttl_ms=self._lease.ttl_ms,
            fail_fast=self._fail_fast if fail_fast is None else fail_fast,
            call=secrets.token_hex(8),
        )
        if state == UNSERVED:
            raise await self._health.unserved(request.model)
        return state == NEW

    async def _card(self, model: str | None) -> ModelCard:
        self._check_open()
        return await self._cards.find(model)

    def _check_open(self) -> None:
        if not self._open:
            raise ClientClosedError("the client is not connected; use it inside `async with Client.connect(url)`")

    async def _disconnect(self) -> None:
        await self._subscriber.close()
        await self._commands.close()
