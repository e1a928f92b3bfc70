"""A model's figures at one moment, as vLLM's ``get_metrics`` gives them: from heartbeats and from the queue.

Names are those of ``shared/metrics``, with "penstock:" before them; where vLLM has the same it is called the same.
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
    """Base of the three kinds."""

    name: str
    labels: dict[str, str]


class Counter(Metric, frozen=True, kw_only=True):
    """Only grows while its engine lives, and begins at 0 again with the next."""

    value: int


class Gauge(Metric, frozen=True, kw_only=True):
    """Goes up and down."""

    value: float


class Histogram(Metric, frozen=True, kw_only=True):
    """``buckets`` count, by upper bound ("+Inf" the last), the values that are at most that."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(engines: Sequence[EngineHeartbeat], queue: QueueStats) -> list[Metric]:
    """Return the figures of one model."""
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
