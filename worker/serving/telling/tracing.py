"""Whether an engine makes spans of requests."""

from __future__ import annotations

from collections.abc import Callable

from ....shared.broker.request_history import RequestHistory
from ....shared.tracing.endpoint import is_enabled
from ...config.worker_config import WorkerConfig
from .request_observer import RequestObserver


def attempt_spans(config: WorkerConfig, history_of: Callable[[int], RequestHistory]) -> list[RequestObserver]:
    """Return what makes them; nothing if that is not wanted.

    Args:
        history_of: of a partition's number, what its requests have lived through.

    Raises:
        ConfigurationError: the endpoint cannot be one, or OpenTelemetry is not installed.
    """
    endpoint = config.otlp_traces_endpoint
    if endpoint is None or not is_enabled(endpoint):
        return []
    # Imported here, since nobody else is to load OpenTelemetry.
    from .attempt_spans import AttemptSpans

    return [AttemptSpans(endpoint, config.engine.model_name, config.engine_id, history_of)]
