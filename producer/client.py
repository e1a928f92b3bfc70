"""The asynchronous client: two connections to Redis, any number of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Unpack

import msgspec

from ..shared.broker import NEW, Broker
from ..shared.connection import CommandConnection, Subscriber
from ..shared.errors import ClientClosedError, RequestNotFoundError, UnknownModelError, ValidationError
from ..shared.keys import DEFAULT_NAMESPACE, Keys
from ..shared.messages import Delta, EngineCoreRequest, ModelCard
from ..shared.params import SamplingParams
from ..shared.redis_check import check_redis
from .handle import RequestHandle
from .outputs import RequestOutput
from .prompt import MAX_PAYLOAD_BYTES, Prompt, RequestOptions, build_request, encode_request
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
            By default such a request raises ``UnknownModelError``, since the name is probably mistyped.
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
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        namespace: str = DEFAULT_NAMESPACE,
    ) -> None:
        if not result_ttl_s > 0:
            raise ValidationError(f"result_ttl_s must be positive, got {result_ttl_s!r}")
        self._url = url
        self._default_model = model
        self._tenant = tenant
        self._result_ttl_ms = max(1, int(result_ttl_s * 1000))
        self._wait_for_model = wait_for_model
        self._max_payload_bytes = max_payload_bytes
        self._keys = Keys(namespace)
        self._commands = CommandConnection(url)
        self._subscriber = Subscriber(url)
        self._cards: dict[str, ModelCard] = {}
        self._brokers: dict[str, Broker] = {}
        self._interactive: dict[str, str] = {}
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
        live = list(self._interactive.items())
        await asyncio.gather(*(self._broker(model).cancel(id_) for id_, model in live), return_exceptions=True)
        await self._disconnect()

    # ------------------------------------------------------------------ requests

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

        Raises:
            ValidationError: an argument is wrong; nothing was enqueued (or the worker found the prompt too long).
            UnknownModelError: no worker has ever served ``model`` here.
            RequestFailedError: the engine failed the request.
        """
        request = await self._build(prompt, params, options)
        assert request.sampling_params is not None
        async with aclosing(self._run(request)) as deltas:
            async for delta in in_kind(deltas, request.sampling_params.output_kind):
                yield delta

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> RequestOutput:
        """Generate from ``prompt`` and return the whole output. Cancelling the awaiting task cancels the request.

        Raises: as ``stream``.
        """
        request = await self._build(prompt, params, options)
        async with aclosing(self._run(request)) as deltas:
            return await collect(deltas, request.model, request.request_id, prompt)

    async def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> RequestHandle:
        """Enqueue a detached request, which runs on without anyone listening, and return a handle on it.

        Raises: as ``stream``, before anything was enqueued.
        """
        request = await self._build(prompt, params, options)
        await self._enqueue(request, detached=True)
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
        cards = await self._commands.execute("HGETALL", self._keys.models())
        pairs = zip(cards[::2], cards[1::2], strict=True)
        self._cards = {name.decode(): msgspec.json.decode(card, type=ModelCard) for name, card in pairs}
        return self._cards

    async def follow(self, model: str, request_id: str, after: int = -1) -> AsyncGenerator[Delta]:
        """Iterate over the deltas of a request that is already enqueued; see ``RequestHandle.stream``."""
        self._check_open()
        reader = DeltaReader(self._broker(model), self._subscriber, request_id, after)
        try:
            await reader.subscribe()
            reader.catch_up()
            async for delta in checked(reader):
                yield delta
        finally:
            reader.close()

    # ------------------------------------------------------------------ parts

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

    async def _run(self, request: EngineCoreRequest) -> AsyncGenerator[Delta]:
        """Enqueue an interactive request and follow it; leaving early cancels it."""
        broker = self._broker(request.model)
        reader = DeltaReader(broker, self._subscriber, request.request_id)
        owner = False
        try:
            await reader.subscribe()
            owner = True  # before the call: a cancelled call may have reached Redis
            self._interactive[request.request_id] = request.model
            if await self._enqueue(request, detached=False) != NEW:
                owner = False
                reader.catch_up()
            async for delta in checked(reader):
                yield delta
        finally:
            reader.close()
            self._interactive.pop(request.request_id, None)
            if owner and not reader.ended and self._open:
                await asyncio.shield(broker.cancel(request.request_id))

    async def _enqueue(self, request: EngineCoreRequest, *, detached: bool) -> str:
        payload = encode_request(request, self._max_payload_bytes)
        return await self._broker(request.model).enqueue(
            request.request_id, payload, result_ttl_ms=self._result_ttl_ms, detached=detached
        )

    async def _card(self, model: str | None) -> ModelCard:
        self._check_open()
        name = model or self._default_model
        card = self._cards.get(name) if name else None
        if card is not None:
            return card
        cards = await self.models()
        if name is None:
            if len(cards) == 1:
                return next(iter(cards.values()))
            if not cards:
                raise UnknownModelError("no worker has served a model on this Redis yet; start one, or pass model=")
            raise ValidationError(f"model must be given: this Redis knows {', '.join(sorted(cards))}")
        if name in cards:
            return cards[name]
        if self._wait_for_model:
            return ModelCard(model=name)
        known = ", ".join(sorted(cards)) or "none"
        raise UnknownModelError(
            f"no worker has ever served model {name!r} on this Redis (known: {known}); check the name, start a worker, "
            "or connect with wait_for_model=True"
        )

    def _check_open(self) -> None:
        if not self._open:
            raise ClientClosedError("the client is not connected; use it inside `async with Client.connect(url)`")

    async def _disconnect(self) -> None:
        await self._subscriber.close()
        await self._commands.close()
