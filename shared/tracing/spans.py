"""The tracer, and the headers by which a trace continues in another process (W3C Trace Context)."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer, TracerProvider, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACE_PARENT, TRACE_STATE = "traceparent", "tracestate"
_propagator = TraceContextTextMapPropagator()


def tracer_of(provider: TracerProvider) -> Tracer:
    """Return the tracer of Penstock's spans."""
    return provider.get_tracer("penstock")


def context_of(headers: Mapping[str, str] | None) -> Context:
    """Return the trace of headers; an empty context without one, or if it cannot be read."""
    return _propagator.extract(headers, Context()) if headers else Context()


def headers_of(span: Span, others: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the headers that make a span the parent of work elsewhere, and those of ``others`` that are of no
    trace. They say as well that it is not sampled."""
    if not span.get_span_context().is_valid:  # of a provider that makes none
        return dict(others or {})
    headers = {name: value for name, value in (others or {}).items() if name not in (TRACE_PARENT, TRACE_STATE)}
    _propagator.inject(headers, set_span_in_context(span, Context()))
    return headers
