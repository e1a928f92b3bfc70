"""The tracing of a process: none, or spans that go to an endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .endpoint import check_endpoint, is_enabled

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


class Tracing:
    """``provider`` creates spans; None without an endpoint."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self.provider = provider

    async def close(self) -> None:
        """Send all pending spans, within moments. Idempotent."""
        provider, self.provider = self.provider, None
        if provider is not None:
            from .provider import close_provider

            await close_provider(provider)


def open_tracing(endpoint: str | None, service: str) -> Tracing:
    """Return the tracing of a process that was given this endpoint, as the service of that name.

    Raises:
        ConfigurationError: the endpoint cannot be one, or OpenTelemetry is not installed.
    """
    if endpoint is not None:
        check_endpoint(endpoint)
    if endpoint is None or not is_enabled(endpoint):
        return Tracing()
    # Imported here, since nobody else is to load OpenTelemetry.
    from .provider import open_provider

    return Tracing(open_provider(endpoint, service=service))
