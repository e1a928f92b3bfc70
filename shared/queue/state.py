"""The state of a queue as ``estimate.py`` reads it: bands, lanes, limits and measured rates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from .stats import Readiness

# Arrivals continue at their recent rate for about this long.
_LATELY_S = 30.0


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Measured rates and work of a band.

    Args:
        ended_per_s: requests that ended in the last half minute or so, without those that were never claimed.
        tokens_per_s: prompts and ``max_tokens`` of these requests.
        entered_per_s: requests that arrived in the last half minute or so.
        entered_before_per_s: requests that arrived in the last five minutes or so.
        ended: requests that ended in the last five minutes or so; older ones count less.
        tokens: their prompts and ``max_tokens``.
        computed_tokens: their computed tokens.
        held_s: seconds for which engines held them.
    """

    ended_per_s: float = 0.0
    tokens_per_s: float = 0.0
    entered_per_s: float = 0.0
    entered_before_per_s: float = 0.0
    ended: float = 0.0
    tokens: float = 0.0
    computed_tokens: float = 0.0
    held_s: float = 0.0

    def entered_per_s_after(self, after_s: float) -> float:
        """Return the expected rate of arrivals after a time: the recent rate at first, that of five minutes later."""
        share = math.exp(-after_s / _LATELY_S)
        return share * self.entered_per_s + (1 - share) * self.entered_before_per_s

    def __add__(self, other: Rates) -> Rates:
        return Rates(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's weight and quotas, None for no limit; ``blocked_for_s`` is as in ``TenantStats``."""

    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    num_running: int = 0
    blocked_for_s: float = 0.0


class LaneState(msgspec.Struct, frozen=True, kw_only=True):
    """Queued requests of a tenant in a band. ``virtual_time`` is None while the tenant has no turn."""

    tenant: str
    depth: int
    num_tokens: int
    weight: float = 1.0
    age_s: float = 0.0
    virtual_time: float | None = None


class BandState(msgspec.Struct, frozen=True, kw_only=True):
    """Queued requests of a band, without those of tenants over a quota.

    Args:
        num_tokens: prompts and ``max_tokens``.
        age_s: age of the oldest request.
        num_tenants: tenants with a lane in the band.
        lanes: lanes of these tenants, or a sample of them.
    """

    band: str
    depth: int = 0
    num_tokens: int = 0
    age_s: float = 0.0
    num_tenants: int = 0
    rates: Rates = Rates()
    lanes: Sequence[LaneState] = ()


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a queue at one moment.

    Args:
        ageing_s, strictness: of the policy.
        num_running: requests that engines hold.
        num_returned: requests that wait for another engine; engines claim them before all others.
        num_engines: live engines that claim.
        num_seqs: requests that these engines can hold at the same time.
        num_free: requests that they could claim now.
        held_share: time for which engines have held requests recently, divided by the part of claims that have ended.
            Above 1 while requests take longer than those that have ended so far.
        bands: the most urgent first.
        readiness: when engines claim, if none does.
    """

    bands: Sequence[BandState]
    is_paused: bool = False
    ageing_s: float | None = None
    strictness: float = 1.0
    num_running: int = 0
    num_returned: int = 0
    num_engines: int = 0
    num_seqs: int = 0
    num_free: float = 0.0
    held_share: float = 1.0
    readiness: Readiness = Readiness()


def merged_state(parts: Sequence[QueueState]) -> QueueState:
    """Return the state of a queue in several partitions. All have the same engines, which report to each of them."""
    if len(parts) == 1:
        return parts[0]
    names = [band.band for band in parts[0].bands]
    by_name = [{band.band: band for band in part.bands} for part in parts]
    shares = [(part.num_running, part.held_share) for part in parts if part.num_running]
    return QueueState(
        is_paused=any(part.is_paused for part in parts),
        ageing_s=parts[0].ageing_s,
        strictness=parts[0].strictness,
        num_running=sum(part.num_running for part in parts),
        num_returned=sum(part.num_returned for part in parts),
        num_engines=max(part.num_engines for part in parts),
        num_seqs=max(part.num_seqs for part in parts),
        num_free=max(part.num_free for part in parts),
        # Every engine and every home serves all partitions.
        readiness=parts[0].readiness,
        held_share=sum(number * share for number, share in shares) / sum(number for number, _ in shares)
        if shares
        else 1.0,
        bands=[_merged_band([bands[name] for bands in by_name if name in bands]) for name in names],
    )


def _merged_band(parts: Sequence[BandState]) -> BandState:
    return BandState(
        band=parts[0].band,
        depth=sum(part.depth for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        age_s=max(part.age_s for part in parts),
        num_tenants=sum(part.num_tenants for part in parts),
        rates=sum((part.rates for part in parts), Rates()),
    )
