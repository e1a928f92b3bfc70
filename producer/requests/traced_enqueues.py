"""Spans of enqueue calls by OpenTelemetry's API alone, because an app may use any provider."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, TracerProvider

from ...shared.errors import PenstockError
from ...shared.tracing import attributes
from ...shared.tracing.spans import TRACE_PARENT, context_of, headers_of, tracer_of
from .enqueuer import EnqueueSpans
from .queue_entry import Outgoing


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
