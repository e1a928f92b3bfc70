"""A tracer provider that exports to an endpoint. No request waits for that, whatever the receiver does.

Spans wait in a bounded queue for a thread that sends them; further ones are dropped. Everything else is as
OpenTelemetry has it: ``OTEL_*`` variables choose sampler, service name, headers, limits and time-outs.
"""

from __future__ import annotations

import asyncio
import threading

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator

from ..process.log import get_logger
from ..values.distribution import VERSION
from .endpoint import check_endpoint

# A process that leaves waits so long for its last spans to be sent.
CLOSE_TIMEOUT_S = 1.0
# Who goes on sending them after that.
CLOSING_THREAD = "penstock-spans"

log = get_logger(__name__)


def open_provider(endpoint: str, *, service: str, instance: str = "", ids: IdGenerator | None = None) -> TracerProvider:
    """Return a provider whose spans go to ``endpoint``; ``close_provider`` ends it.

    Args:
        service: its name, where OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES give none.
        instance: which process of the service it is.
        ids: makes the ids of spans; random ones when None.

    Raises:
        ConfigurationError: as ``check_endpoint``.
    """
    own = {SERVICE_NAME: service, SERVICE_VERSION: VERSION, SERVICE_INSTANCE_ID: instance}
    attributes = OTELResourceDetector().detect().attributes
    resource = Resource.create({name: value for name, value in own.items() if value and name not in attributes})
    exporter = OTLPSpanExporter(endpoint=check_endpoint(endpoint))
    # Not at the exit of the interpreter, where it would wait for as long as an export may take.
    provider = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


async def close_provider(provider: TracerProvider) -> None:
    """Send pending spans and end within ``CLOSE_TIMEOUT_S``, whatever the receiver does."""
    closing = threading.Thread(target=provider.shutdown, name=CLOSING_THREAD, daemon=True)
    closing.start()
    await asyncio.to_thread(closing.join, CLOSE_TIMEOUT_S)
    if closing.is_alive():
        log.warning("spans_not_sent", waited_s=CLOSE_TIMEOUT_S)
