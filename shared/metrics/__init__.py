"""Statistics of engines and queues as metrics: defined once, for every exporter and for the guide's table."""

from .catalogue import ALL, MetricKind, MetricSpec
from .engine_samples import SERVING, engines_samples
from .queue_samples import queue_samples
from .sample import Sample, values_of

__all__ = ["ALL", "SERVING", "MetricKind", "MetricSpec", "Sample", "engines_samples", "queue_samples", "values_of"]
