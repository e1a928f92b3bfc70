"""Select how a client creates spans: not at all, with the app's tracer provider, or exported to an endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..shared.errors import ValidationError
from ..shared.tracing.endpoint import check_endpoint, is_enabled
from ..shared.values.shown import shown
from .requests.spans.enqueue_spans import EnqueueSpans

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
        from .requests.spans.traced_enqueues import TracedEnqueues

        return TracedEnqueues(provider)
    assert endpoint is not None
    check_endpoint(endpoint)
    if not is_enabled(endpoint):
        return EnqueueSpans()
    from .requests.spans.exported_enqueues import ExportedEnqueues

    return ExportedEnqueues(endpoint)
