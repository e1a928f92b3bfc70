"""Whether there are spans of HTTP requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from starlette.middleware import Middleware

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


def http_spans(provider: TracerProvider | None, untraced_paths: Iterable[str]) -> list[Middleware]:
    """Return what makes spans of requests but those of ``untraced_paths``; nothing without a provider."""
    if provider is None:
        return []
    # Imported here, since nobody else is to load OpenTelemetry.
    from ...shared.tracing.spans import tracer_of
    from .http_spans import HttpSpans

    return [Middleware(HttpSpans, tracer_of(provider), untraced_paths)]
