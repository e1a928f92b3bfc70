"""Figures for Prometheus: what a process of the gateway counts itself, and the text in which they are told."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from ...shared.stats.buckets import FIRST_TOKEN_TIME_S, REQUEST_TIME_S
from .figures import Family, Reading

# Times at which counters began; Prometheus does not need them, and would take each for a metric of its own.
_CREATED = "_created"


class Metrics:
    """The counts of one process. ``route`` is the path of the route, not of the request, so that there are few."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.requests = Counter(
            "penstock_http_requests", "HTTP requests answered", ["route", "method", "status"], registry=self.registry
        )
        self.latency = Histogram(
            "penstock_http_request_duration_seconds",
            "From the request's head to the end of its response",
            ["route"],
            buckets=REQUEST_TIME_S,
            registry=self.registry,
        )
        self.first_chunk = Histogram(
            "penstock_http_time_to_first_chunk_seconds",
            "From the request's head to the first chunk of a stream",
            ["route"],
            buckets=FIRST_TOKEN_TIME_S,
            registry=self.registry,
        )
        self.in_flight = Gauge("penstock_http_requests_in_flight", "HTTP requests under way", registry=self.registry)
        self.resumed = Counter(
            "penstock_http_streams_resumed", "Streams picked up with Last-Event-ID", registry=self.registry
        )

    def families(self) -> list[Family]:
        """Return them as they are now."""
        return [
            Family(
                metric.name,
                metric.type,
                metric.documentation,
                [
                    Reading(sample.name, tuple(sorted(sample.labels.items())), sample.value)
                    for sample in metric.samples
                    if not sample.name.endswith(_CREATED)
                ],
            )
            for metric in self.registry.collect()
        ]


def render(families: list[Family]) -> bytes:
    """Return figures as text."""
    registry = CollectorRegistry()
    registry.register(_Collected([_metric(family) for family in families]))
    return generate_latest(registry)


class _Collected:
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def _metric(family: Family) -> Metric:
    metric = Metric(family.name, family.help, family.kind)
    for reading in family.readings:
        metric.add_sample(reading.name, dict(reading.labels), reading.value)
    return metric
