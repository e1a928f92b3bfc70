"""Samples in the text that Prometheus reads; needs prometheus_client, which only exporters install."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ..stats import Histogram
from .catalogue import MetricKind, MetricSpec, Sample


class MetricNames(StrEnum):
    """Names to expose: our own, or also vLLM's, for existing dashboards and rules."""

    PENSTOCK = "penstock"
    VLLM = "vllm"


def expose(samples: Iterable[Sample], names: MetricNames = MetricNames.PENSTOCK) -> bytes:
    """Return the samples as text, each metric's together."""
    registry = CollectorRegistry()
    registry.register(_Collected([*_families([*samples], names)]))
    return generate_latest(registry)


class _Collected:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _families(samples: list[Sample], names: MetricNames) -> Iterator[Metric]:
    by_spec: dict[str, list[Sample]] = {}
    for sample in samples:
        by_spec.setdefault(sample.spec.name, []).append(sample)
    for of_one in by_spec.values():
        spec = of_one[0].spec
        yield _family(f"penstock_{spec.name}", spec, of_one)
        if names == MetricNames.VLLM and spec.is_vllms:
            yield _family(f"vllm:{spec.name}", spec, of_one)


def _family(name: str, spec: MetricSpec, samples: list[Sample]) -> Metric:
    family = _FAMILIES[spec.kind](name, spec.help, labels=spec.labels)
    for sample in samples:
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(sample.value, Histogram)
            family.add_metric(sample.labels, sample.value.cumulative(), sample.value.sum)
        else:
            family.add_metric(sample.labels, sample.value)
    return family


_FAMILIES = {
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
}
