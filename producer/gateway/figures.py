"""Figures of several processes as one: what prometheus_client holds in each of them, added up.

A sum over the processes of one gateway is what one process would have counted. Counts of a process that has ended stay
in the sum, as far as they were told, so that no counter ever falls; its gauges leave it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

_GAUGE = "gauge"


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """One value. ``name`` has the suffix of a bucket, a sum or a count."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True):
    """The values of one metric; ``kind`` is Prometheus's word for it, and ``name`` has no suffix."""

    name: str
    kind: str
    help: str
    readings: list[Reading]


def add_up(processes: Iterable[list[Family]]) -> list[Family]:
    """Return the metrics of all processes, each value the sum of theirs; in the order in which they first came."""
    first: dict[str, Family] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for families in processes:
        for family in families:
            first.setdefault(family.name, family)
            of_one = sums.setdefault(family.name, {})
            for reading in family.readings:
                key = (reading.name, reading.labels)
                of_one[key] = of_one.get(key, 0.0) + reading.value
    return [
        Family(name, family.kind, family.help, [Reading(*key, value) for key, value in sums[name].items()])
        for name, family in first.items()
    ]


def without_gauges(families: list[Family]) -> list[Family]:
    """Return what of a process's figures stays true when it has ended."""
    return [family for family in families if family.kind != _GAUGE]


def gauge(name: str, text: str, value: float) -> Family:
    """Return a gauge without labels."""
    return Family(name, _GAUGE, text, [Reading(name, (), value)])


def counter(name: str, text: str, value: float) -> Family:
    """Return a counter without labels; ``name`` has no "_total"."""
    return Family(name, "counter", text, [Reading(f"{name}_total", (), value)])
