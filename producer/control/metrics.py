"""Snapshot of a model's metrics, in the form of vLLM's ``get_metrics``: from heartbeats and from the queue.

Names are those of ``shared/metrics`` with the prefix "penstock:". A metric that vLLM has too has vLLM's name.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...shared.deployment.records import EngineHeartbeat
from ...shared.metrics import MetricKind, Sample, engines_samples, queue_samples
from ...shared.queue.stats import QueueStats
from ...shared.stats.engine import Histogram as Counts

PREFIX = "penstock:"


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of the three kinds of metrics."""

    name: str
    labels: dict[str, str]


class Counter(Metric, frozen=True, kw_only=True):
    """A value that only grows while its engine process runs; a new process starts at 0."""

    value: int


class Gauge(Metric, frozen=True, kw_only=True):
    """A value that rises and falls."""

    value: float


class Histogram(Metric, frozen=True, kw_only=True):
    """A distribution. ``buckets`` maps each upper bound (the last is "+Inf") to the number of values up to it."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(engines: Sequence[EngineHeartbeat], queue: QueueStats) -> list[Metric]:
    """Return the metrics of one model."""
    samples = [*queue_samples(queue), *engines_samples(engines)]
    return [*map(_metric, samples)]


def _metric(sample: Sample) -> Metric:
    spec, value = sample.spec, sample.value
    name, labels = PREFIX + spec.name, dict(zip(spec.labels, sample.labels, strict=True))
    if isinstance(value, Counts):
        return Histogram(name=name, labels=labels, count=value.count, sum=value.sum, buckets=dict(value.cumulative()))
    if spec.kind == MetricKind.COUNTER:
        return Counter(name=f"{name}_total", labels=labels, value=int(value))
    return Gauge(name=name, labels=labels, value=float(value))
