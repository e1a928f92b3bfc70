"""The asynchronous client: two connections to Redis, any number of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ..shared.connection import RETRY_FOR_S
from ..shared.errors import ValidationError
from ..shared.keys import Keys
from ..shared.redis_access.embedded import resolve_redis_url
from ..shared.shards import ShardsArgument, check_servers, make_connections
from ..shared.tracing.endpoint import check_endpoint, is_enabled
from ..shared.values.arguments import check_argument_names
from ..shared.values.names import DEFAULT_NAMESPACE
from ..shared.values.shown import shown
from .beam_search import BeamSearches
from .client_parts.detached import DetachedRequests
from .client_parts.pooling import Poolings
from .control.adapter_control import AdapterControl
from .control.engine_control import EngineControl, WeightsControl
from .control.fleet_control import GroupControl, WorkerControl
from .control.model_view import ModelView, TextControl
from .control.queue_control import QueueControl, RequestView
from .inputs.lora import AdapterResolver
from .inputs.options import check_flag
from .inputs.prompt import MAX_PAYLOAD_BYTES
from .io_processors import IOProcessor, IOProcessors
from .requests.enqueuer import EnqueueSpans
from .requests.health import Health
from .requests.lease import LEASE_TTL_S, ClientLease
from .requests.model_cards import ModelCards
from .requests.request_builder import RequestBuilder
from .requests.single_requests import SingleRequests

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

RESULT_TTL_S = 3600.0
# Thirty years, the limit of jobs too. Redis counts in milliseconds and accepts no infinity.
MAX_RESULT_TTL_S = 1e9


class ClientOptions(TypedDict, total=False):
    """Options of ``Client.connect`` and ``LLM``, as ``Client`` documents them."""

    model: str | None
    tenant: str
    result_ttl_s: float
    wait_for_model: bool
    fail_fast: bool
    lease_ttl_s: float
    retry_for_s: float
    max_payload_bytes: int
    namespace: str
    shards: ShardsArgument
    io_processors: IOProcessors | Iterable[str | IOProcessor]
    otlp_traces_endpoint: str | None
    tracer_provider: TracerProvider | None


class Client(
    BeamSearches,
    Poolings,
    DetachedRequests,
    QueueControl,
    RequestView,
    EngineControl,
    WeightsControl,
    AdapterControl,
    GroupControl,
    WorkerControl,
    ModelView,
    TextControl,
):
    """Enqueue requests and stream or await their results.

    Use ``async with Client.connect(url) as client:`` (or ``client = await Client.connect(url)`` and ``close()``). One
    client serves any number of concurrent requests, in the process and the event loop that opened it.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://`` or ``rediss+sentinel://``. When None,
            that of PENSTOCK_REDIS_URL, or the embedded Redis, which is started or joined as every command does.
        model: default model; may be left out if Redis knows only one model.
        tenant: the tenant of requests that name no other.
        result_ttl_s: how long the result of a request can be read after its end.
        wait_for_model: accept requests for a model that no worker has ever served; they wait for a worker. By default
            they raise ``UnknownModelError``, since the name is probably mistyped.
        fail_fast: whether requests raise ``EngineDeadError`` if no live engine serves their model, or if its last
            engine dies before they end. By default they wait for an engine.
        lease_ttl_s: how long streamed and awaited requests outlive the death of this process.
        retry_for_s: how long a call waits for an unreachable Redis; ``inf`` for no limit. Streams wait without a limit.
        namespace: prefix of all keys, the same as the workers'.
        shards: the Redis servers that hold the models, if ``url`` does not hold them: ``name=url,url,…``, a list or a
            mapping; PENSTOCK_SHARDS when None.
        io_processors: plugins that turn other data into prompts for ``encode``: entry points of the group
            ``penstock.io_processors``, ``MODULE:CLASS``, or objects.
        otlp_traces_endpoint: endpoint that receives the spans of requests, by OTLP over HTTP. Extra ``otel``.
        tracer_provider: creates the spans instead, in an app that sets up OpenTelemetry itself:
            ``opentelemetry.trace.get_tracer_provider()``.
    """

    def __init__(
        self,
        url: str | None = None,
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
        shards: ShardsArgument = None,
        io_processors: IOProcessors | Iterable[str | IOProcessor] = (),
        otlp_traces_endpoint: str | None = None,
        tracer_provider: TracerProvider | None = None,
    ) -> None:
        is_number = isinstance(result_ttl_s, int | float) and not isinstance(result_ttl_s, bool)
        if not is_number or not 0 < result_ttl_s < MAX_RESULT_TTL_S:
            raise ValidationError(
                f"result_ttl_s must be a number of seconds above 0 and below {MAX_RESULT_TTL_S:.0f}, "
                f"got {shown(result_ttl_s)}"
            )
        self._embedded: ExitStack | None = None
        if url is None:
            self._embedded = ExitStack()
            url = self._embedded.enter_context(resolve_redis_url(None))
        self._url = url
        self._shards = shards
        is_loaded = isinstance(io_processors, IOProcessors)
        self._io_processors = io_processors if is_loaded else IOProcessors(io_processors)
        self._lease = ClientLease(lease_ttl_s)
        self._spans = enqueue_spans(otlp_traces_endpoint, tracer_provider)
        keys = Keys(namespace)
        commands, subscriber = make_connections(url, shards, keys, retry_for_s=retry_for_s)
        health = Health(commands, keys)
        requests = SingleRequests(
            commands,
            subscriber,
            keys,
            health,
            self._lease,
            result_ttl_ms=max(1, int(result_ttl_s * 1000)),
            fail_fast=check_flag("fail_fast", fail_fast),
            max_payload_bytes=max_payload_bytes,
            spans=self._spans,
        )
        cards = ModelCards(commands, keys, default=model, wait_for_model=wait_for_model)
        adapters = AdapterResolver(commands, keys)
        builder = RequestBuilder(requests, cards, adapters, tenant)
        super().__init__(commands, subscriber, keys, requests, builder, adapters, health)

    @classmethod
    def connect(cls, url: str | None = None, **options: Unpack[ClientOptions]) -> Client:
        """Return a client to enter with ``async with`` or to await; the options are those of the class."""
        check_argument_names("Client.connect", options, ("url", *ClientOptions.__annotations__))
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
            ConfigurationError: the URL is invalid.
            RedisUnavailableError: no server answers at the URL.
            RedisUnsupportedError: the server is too old or lacks a command.
            ClientClosedError: the client is already open in another event loop, or in the process that forked this one.
        """
        lifecycle = self._requests.lifecycle
        if lifecycle.is_open or lifecycle.is_forked:
            lifecycle.check()
            return self
        try:
            await check_servers(self._url, self._shards, namespace=self._keys.namespace)
            await self._commands.open()
            await self._subscriber.open()
            await self._spans.open()
        except BaseException:
            await self._disconnect()
            raise
        lifecycle.open()
        self._health_watch.open()
        return self

    async def close(self) -> None:
        """Cancel the requests that this client streams or awaits, and disconnect. Detached requests continue.

        Does nothing in a process that was forked after the client was opened, since the connections belong to its
        parent.
        """
        lifecycle = self._requests.lifecycle
        if not lifecycle.is_open:
            return
        lifecycle.close()
        await self._health_watch.close()
        await self._lease.close()
        await self._requests.close()
        await self._disconnect()

    async def _disconnect(self) -> None:
        await self._subscriber.close()
        await self._commands.close()
        await self._spans.close()
        if self._embedded is not None:
            # The last user stops the server, which takes a moment.
            await asyncio.to_thread(self._embedded.close)


if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


def enqueue_spans(endpoint: str | None, provider: TracerProvider | None) -> EnqueueSpans:
    """Return the object that creates the client's spans.

    Raises:
        ConfigurationError: the endpoint is invalid, or OpenTelemetry is not installed.
        ValidationError: both arguments are passed, or the provider is not a ``TracerProvider``.
    """
    if endpoint is None and provider is None:
        return EnqueueSpans()
    if endpoint is not None and provider is not None:
        raise ValidationError(
            "tracer_provider and otlp_traces_endpoint are two destinations of the same spans; pass one of them"
        )
    if provider is not None and not callable(getattr(provider, "get_tracer", None)):
        raise ValidationError(f"tracer_provider must be a TracerProvider of OpenTelemetry, got {shown(provider)}")
    # Imported here, so that clients without tracing do not load OpenTelemetry.
    if provider is not None:
        from .requests.traced_enqueues import TracedEnqueues

        return TracedEnqueues(provider)
    assert endpoint is not None
    check_endpoint(endpoint)
    if not is_enabled(endpoint):
        return EnqueueSpans()
    from .requests.traced_enqueues import ExportedEnqueues

    return ExportedEnqueues(endpoint)
