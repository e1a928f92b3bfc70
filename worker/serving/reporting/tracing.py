"""Creation of the observer that sends spans, if tracing is enabled."""

from __future__ import annotations

from collections.abc import Callable

from ....shared.broker.request_history import RequestHistory
from ....shared.tracing.endpoint import is_enabled
from ...config.worker_config import WorkerConfig
from .request_observer import RequestObserver


def attempt_spans(config: WorkerConfig, history_of: Callable[[int], RequestHistory]) -> list[RequestObserver]:
    """Return the observer that sends spans, in a list; empty if tracing is disabled.

    Args:
        history_of: returns the history of requests in the partition with a number.

    Raises:
        ConfigurationError: the endpoint is invalid, or OpenTelemetry is not installed.
    """
    endpoint = config.otlp_traces_endpoint
    if endpoint is None or not is_enabled(endpoint):
        return []
    # Imported here, so that OpenTelemetry is loaded only if tracing is enabled.
    from .attempt_spans import AttemptSpans

    return [AttemptSpans(endpoint, config.engine.model_name, config.engine_id, history_of)]
