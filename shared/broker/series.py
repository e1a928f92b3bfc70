"""Counts of a model over time: sums of a minute (retained for a day), ten minutes (a week) and an hour (90 days).

Each process that counts adds its counts since its last call, with a number by which a repeated call is recognized. So
no process has to lead, and a killed process loses its counts since its last call. Gauges are sampled by reapers and
stored as sums: they are means over their samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from ..connection import CommandConnection
from ..errors import ValidationError
from ..keys import ModelKeys
from ..stats import Histogram
from ..values.shown import shown
from .script import run_script

# Seconds of a step, and how many seconds its series covers.
STEPS_S = {60: 24 * 3600, 600: 7 * 24 * 3600, 3600: 90 * 24 * 3600}
MAX_HOURS = 90 * 24
# Kinds of fields of a tenant, and histograms of requests.
TENANT_KINDS = ("tokens_in", "tokens_out", "requests")
HISTOGRAMS = ("time_to_first_token_s", "inter_token_latency_s", "queue_time_s", "latency_s")
GAUGES = ("waiting", "waiting_tokens", "running", "oldest_ms", "engines")
_AT_ONCE = 120
_encoder = msgspec.msgpack.Encoder()


class TenantPoint(msgspec.Struct, kw_only=True):
    """Counts of one tenant in one step."""

    tokens_in: int = 0
    tokens_out: int = 0
    requests: int = 0


class SeriesPoint(msgspec.Struct, kw_only=True):
    """A step of a series.

    Args:
        at: Unix time in seconds at which it begins.
        tokens_in: prompt tokens, counted with the first output token; ``tokens_out`` are counted when generated.
        ended: requests by the state of their end, without ends that Redis has lost.
        tenants: counts of up to 100 tenants; "" has the sum of the others.
        histograms: those of ``HISTOGRAMS`` that have values, in seconds.
        gauges: means of ``GAUGES`` over the samples of the step; empty without samples.
    """

    at: float
    tokens_in: int = 0
    tokens_out: int = 0
    ended: dict[str, int] = {}
    tenants: dict[str, TenantPoint] = {}
    histograms: dict[str, Histogram] = {}
    gauges: dict[str, float] = {}

    def quantile(self, name: str, share: float) -> float | None:
        """Return an upper bound of this share of the values, as fine as the buckets; None without any."""
        histogram = self.histograms.get(name)
        return None if histogram is None or not histogram.count else histogram.quantile(share)


class SeriesStore:
    """All methods raise ``RedisUnavailableError`` when Redis is unavailable for longer than the connection retries."""

    def __init__(self, connection: CommandConnection, keys: ModelKeys) -> None:
        self._connection = connection
        self._keys = keys

    async def add(
        self,
        writer: str,
        number: int,
        amounts: Mapping[str, int],
        tenants: Mapping[str, TenantPoint] | None = None,
    ) -> bool:
        """Add the counts of ``writer`` since its last call. False if they had been added already.

        Args:
            writer: id of one run of a process.
            number: number of this call of the writer, from 1 on.
            amounts: whole numbers, by the names of fields; see ``bucket_amounts``.
        """
        flat = [part for pair in amounts.items() for part in pair]
        tenant_counts = [
            part
            for tenant, point in (tenants or {}).items()
            for kind in TENANT_KINDS
            if getattr(point, kind)
            for part in (kind, tenant, getattr(point, kind))
        ]
        args = [writer, number, _encoder.encode(flat), _encoder.encode(tenant_counts)]
        return bool(await run_script(self._connection, self._keys, "add_series", [self._keys.leases], args))

    async def read(self, *, hours: float = 1.0, step_s: int | None = None) -> list[SeriesPoint]:
        """Return the steps of the last ``hours``, the oldest first, including the current one, without gaps.

        Args:
            step_s: 60, 600 or 3600; by default the finest that covers ``hours``.

        Raises:
            ValidationError: ``hours`` is not above 0 and at most 2160, or ``step_s`` does not cover them.
        """
        valid = isinstance(hours, int | float) and not isinstance(hours, bool) and math.isfinite(hours)
        if not valid or not 0 < hours <= MAX_HOURS:
            raise ValidationError(f"hours must be a number above 0, at most {MAX_HOURS}, got {shown(hours)}")
        reaching = [step for step, reach_s in STEPS_S.items() if reach_s >= 3600 * hours]
        step = reaching[0] if step_s is None else step_s
        if step not in reaching:
            raise ValidationError(f"step_s must be one of {reaching} for {hours:g} hours, got {shown(step_s)}")
        number = max(1, math.ceil(3600 * hours / step))
        points: list[SeriesPoint] = []
        last = 0
        while len(points) < number:
            num_before = number - 1 - len(points)
            args = [step, last, num_before, min(_AT_ONCE, num_before + 1)]
            last, rows = await run_script(self._connection, self._keys, "read_series", [self._keys.leases], args)
            points += [_point(last - (num_before - i) * step, row) for i, row in enumerate(rows)]
        return points


def bucket_amounts(name: str, now: Histogram, before: Histogram | None) -> dict[str, int]:
    """Return fields and amounts of a histogram's new values since ``before``; its sum in microseconds."""
    old = before.counts if before is not None else [0] * len(now.counts)
    bounds = [*(f"{bound:g}" for bound in now.bounds), "inf"]
    amounts = {
        f"{name}:{bound}": count - was for bound, count, was in zip(bounds, now.counts, old, strict=True) if count > was
    }
    if amounts:
        amounts[f"{name}:sum"] = round(1e6 * (now.sum - (before.sum if before is not None else 0.0)))
    return amounts


def summed_points(series: Sequence[Sequence[SeriesPoint]]) -> list[SeriesPoint]:
    """Return the series of a model's partitions as one. Steps that not all have begun are left out."""
    if len(series) == 1:
        return [*series[0]]
    by_start = [{point.at: point for point in points} for points in series]
    starts = sorted(set.intersection(*(set(points) for points in by_start)))
    return [_summed([points[at] for points in by_start]) for at in starts]


def sum_of_steps(points: Sequence[SeriesPoint]) -> SeriesPoint:
    """Return the counts of consecutive steps as one step, without gauges."""
    return msgspec.structs.replace(_summed(points), gauges={})


def _summed(points: Sequence[SeriesPoint]) -> SeriesPoint:
    whole = SeriesPoint(at=points[0].at)
    for point in points:
        whole.tokens_in += point.tokens_in
        whole.tokens_out += point.tokens_out
        for state, count in point.ended.items():
            whole.ended[state] = whole.ended.get(state, 0) + count
        for tenant, counts in point.tenants.items():
            into = whole.tenants.setdefault(tenant, TenantPoint())
            for kind in TENANT_KINDS:
                setattr(into, kind, getattr(into, kind) + getattr(counts, kind))
        for name, histogram in point.histograms.items():
            before = whole.histograms.get(name)
            whole.histograms[name] = histogram if before is None else before.merged(histogram)
        for name, mean in point.gauges.items():
            # Engines hold a lease in every partition, and the oldest is the oldest of all partitions.
            combine = max if name in ("engines", "oldest_ms") else sum
            whole.gauges[name] = combine((whole.gauges.get(name, 0.0), mean))
    return whole


def _point(at: float, flat: Sequence[bytes]) -> SeriesPoint:
    point, samples, gauges = SeriesPoint(at=at), 0, {}
    counts: dict[str, dict[float, int]] = {}
    sums: dict[str, int] = {}
    for field, value in zip(flat[::2], flat[1::2], strict=True):
        name, _, rest = field.decode(errors="replace").partition(":")
        try:
            number = int(value)
        except ValueError:
            continue  # something other than the scripts has written it
        if name == "samples":
            samples = number
        elif name in GAUGES:
            gauges[name] = number
        elif name in HISTOGRAMS and rest == "sum":
            sums[name] = number
        elif name in HISTOGRAMS:
            counts.setdefault(name, {})[float(rest)] = number
        elif name == "ended":
            point.ended[rest] = number
        elif name in TENANT_KINDS and b":" in field:
            setattr(point.tenants.setdefault(rest, TenantPoint()), name, number)
        elif name in ("tokens_in", "tokens_out"):
            setattr(point, name, number)
    if samples:
        point.gauges = {name: total / samples for name, total in gauges.items()}
    for name, by_bound in counts.items():
        bounds = sorted(bound for bound in by_bound if bound != math.inf)
        bucket_counts = [by_bound[bound] for bound in bounds] + [by_bound.get(math.inf, 0)]
        point.histograms[name] = Histogram(tuple(bounds), bucket_counts, sums.get(name, 0) / 1e6)
    return point
