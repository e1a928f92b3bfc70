"""Statistics of engines and queues as metrics: defined once, for every exporter and for the guide's table."""

from .catalogue import ALL, MetricKind, MetricSpec, Sample, values_of
from .samples import SERVING, devices_samples, engines_samples, queue_samples

__all__ = [
    "ALL",
    "SERVING",
    "MetricKind",
    "MetricSpec",
    "Sample",
    "devices_samples",
    "engines_samples",
    "queue_samples",
    "values_of",
]
