"""The endpoint of spans, and whether the exporter is installed."""

from __future__ import annotations

import os
from importlib.util import find_spec
from urllib.parse import SplitResult, urlsplit

from ..errors import ConfigurationError
from ..values.distribution import install_command
from ..values.shown import mask_url, shown

# Path that OpenTelemetry adds to the address of a receiver.
_PATH = "/v1/traces"
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def check_endpoint(endpoint: str) -> str:
    """Return the URL to which spans are posted: that of a receiver, with its usual path where it has none.

    Raises:
        ConfigurationError: it is no URL of HTTP, or the extra is not installed.
    """
    parts = _http_parts(endpoint)
    if parts is None:
        raise ConfigurationError(
            "otlp_traces_endpoint must be the URL of a receiver of OTLP over HTTP, such as "
            f"http://localhost:4318/v1/traces, got {shown(mask_url(str(endpoint)))}"
        )
    if not all(map(_is_installed, _NEEDED)):
        raise ConfigurationError(f"otlp_traces_endpoint needs OpenTelemetry's exporter: {install_command('otel')}")
    return parts._replace(path=_PATH).geturl() if parts.path in ("", "/") else endpoint


def _http_parts(endpoint: object) -> SplitResult | None:
    """Return the parts of an HTTP URL; None for anything else."""
    try:
        parts = urlsplit(endpoint) if isinstance(endpoint, str) else None
        is_url = parts is not None and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        return None
    return parts if is_url else None


def is_enabled(endpoint: str | None) -> bool:
    """Whether who was given this endpoint makes spans: OpenTelemetry may be turned off by its own variable."""
    return endpoint is not None and os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that it lies in
        return False
