"""Spans of enqueue calls: by a provider that the app owns, or exported by the client itself.

An app may use any provider, which needs OpenTelemetry's API alone. Only an export loads its SDK.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, TracerProvider

from ...shared.errors import PenstockError
from ...shared.tracing import attributes
from ...shared.tracing.spans import TRACE_PARENT, context_of, headers_of, tracer_of
from .enqueuer import EnqueueSpans
from .queue_entry import Outgoing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as SDKTracerProvider


class TracedEnqueues(EnqueueSpans):
    """Spans of a provider that the app owns.

    The parent of a span is given by the request's ``trace_headers``; without any, it is the caller's current span.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer: Tracer = tracer_of(provider)

    @contextmanager
    def around(self, outgoing: Sequence[Outgoing]) -> Generator[None]:
        first = outgoing[0].request
        caller_headers = first.trace_headers
        span = self._tracer.start_span(
            "enqueue",
            context_of(caller_headers) if caller_headers and TRACE_PARENT in caller_headers else None,
            SpanKind.PRODUCER,
            attributes.of_request(first.model, first.request_id, first.tenant),
        )
        if span.is_recording():
            span.set_attribute(attributes.BAND, first.band)
            span.set_attribute(attributes.NUM_REQUESTS, len(outgoing))
        headers = headers_of(span, caller_headers)
        for item in outgoing:
            item.request.trace_headers = headers
        try:
            yield
        except Exception as error:
            span.set_attribute(
                attributes.ERROR, error.code if isinstance(error, PenstockError) else type(error).__name__
            )
            span.set_status(Status(StatusCode.ERROR))
            raise
        finally:
            span.end()


class ExportedEnqueues(EnqueueSpans):
    """Spans of a private provider, which exports to ``endpoint`` while the client is open."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._provider: SDKTracerProvider | None = None
        self._traced = EnqueueSpans()

    async def open(self) -> None:
        from ...shared.tracing.provider import open_provider

        if self._provider is None:
            # In a thread, because it queries the host's identity and blocks.
            self._provider = await asyncio.to_thread(open_provider, self._endpoint, service="penstock-client")
            self._traced = TracedEnqueues(self._provider)

    async def close(self) -> None:
        provider, self._provider = self._provider, None
        self._traced = EnqueueSpans()
        if provider is not None:
            from ...shared.tracing.provider import close_provider

            await close_provider(provider)

    def around(self, outgoing: Sequence[Outgoing]) -> AbstractContextManager[None]:
        return self._traced.around(outgoing)
