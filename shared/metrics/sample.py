"""One value of one metric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ..stats.engine import Histogram
from .catalogue import ALL, MetricSpec


class Sample(msgspec.Struct, frozen=True):
    """The value of a metric at one moment, with the values of its labels."""

    spec: MetricSpec
    labels: tuple[str, ...]
    value: float | Histogram


def values_of(labels: tuple[str, ...], values: Mapping[str, float | Histogram | None]) -> Iterator[Sample]:
    """Return a sample of each metric by name, with the same labels; None is unknown and left out."""
    for name, value in values.items():
        if value is not None:
            yield Sample(ALL[name], labels, value)
