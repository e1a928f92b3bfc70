"""Prometheus metrics of the gateway: the counters of one process, sums over processes, and the text of a scrape.

The sum over the processes of a gateway equals the count of a single process. Counters of a process that has ended stay
in the sum as last reported, so no counter ever falls; its gauges are removed.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from ...shared.stats import FIRST_TOKEN_TIME_S, REQUEST_TIME_S

# Creation times of counters. Prometheus does not need them, and would store each as a metric of its own.
_CREATED = "_created"

_GAUGE = "gauge"


class Metrics:
    """The counters of one process. ``route`` is the path of the route, not of the request, so it has few values."""

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
        self.in_flight = Gauge("penstock_http_requests_in_flight", "HTTP requests in progress", registry=self.registry)
        self.resumed = Counter(
            "penstock_http_streams_resumed", "Streams resumed with Last-Event-ID", registry=self.registry
        )
        self.ignored = Counter(
            "penstock_http_fields_ignored",
            "Fields of bodies that had no effect, by name; those that no known program sends are 'other'",
            ["field"],
            registry=self.registry,
        )

    def families(self) -> list[Family]:
        """Return the current values."""
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
    """Return ``families`` in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(_StaticCollector([_metric(family) for family in families]))
    return generate_latest(registry)


class _StaticCollector:
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def _metric(family: Family) -> Metric:
    metric = Metric(family.name, family.help, family.kind)
    for reading in family.readings:
        metric.add_sample(reading.name, dict(reading.labels), reading.value)
    return metric


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """A sample. ``name`` includes the suffix of a bucket, a sum or a count."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True):
    """The samples of one metric. ``kind`` is Prometheus's type, and ``name`` has no suffix."""

    name: str
    kind: str
    help: str
    readings: list[Reading]


def sum_families(processes: Iterable[list[Family]]) -> list[Family]:
    """Return the metrics of all processes, each value summed over them, in order of first appearance."""
    first: dict[str, Family] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for families in processes:
        for family in families:
            first.setdefault(family.name, family)
            values = sums.setdefault(family.name, {})
            for reading in family.readings:
                key = (reading.name, reading.labels)
                values[key] = values.get(key, 0.0) + reading.value
    return [
        Family(name, family.kind, family.help, [Reading(*key, value) for key, value in sums[name].items()])
        for name, family in first.items()
    ]


def without_gauges(families: list[Family]) -> list[Family]:
    """Return the metrics that stay valid after their process has ended."""
    return [family for family in families if family.kind != _GAUGE]


def gauge(name: str, text: str, value: float) -> Family:
    """Return a gauge without labels."""
    return Family(name, _GAUGE, text, [Reading(name, (), value)])


def counter(name: str, text: str, value: float) -> Family:
    """Return a counter without labels; ``name`` has no "_total"."""
    return Family(name, "counter", text, [Reading(f"{name}_total", (), value)])
