"""Measurements of a queue as the scripts return them, and as an estimate of waits needs them."""

from __future__ import annotations

import math

import msgspec

from ..queue.state import BandState, LaneState, Limits, QueueState, Rates
from ..queue.stats import Readiness
from .broker import SEQS_PER_KEPT_ONE

# Must equal RATE_WINDOW_MS and WORK_WINDOW_MS of settling.lua.
_RATE_WINDOW_MS, _WORK_WINDOW_MS = 30_000, 300_000
# The rate of a shorter time is not meaningful.
_LEAST_WINDOW_S = 1.0
# A request that has waited for longer shows that the engines' free places are all reserved.
_NOT_CLAIMED_MS = 1000


class RawBand(msgspec.Struct, array_like=True):
    """A band of ``RawMeasures``."""

    band: str
    depth: int
    num_tokens: int
    num_blocked: int
    num_blocked_tokens: int
    num_tenants: int
    oldest_ms: float
    num_entered: int
    rate: str
    lanes: list[tuple[str, float, int, int, float, float]]


class RawMeasures(msgspec.Struct, array_like=True):
    """The reply of ``measures.lua``."""

    now_ms: float
    paused_at_ms: float
    ageing_ms: float
    strictness: float
    num_started: int
    num_returned: int
    held_at_ms: float
    rate_held_ms: float
    rate_ended_ms: float
    rooms: tuple[int, int, int, int, int]
    bands: list[RawBand]


class RawTenant(msgspec.Struct, array_like=True):
    """The reply of ``tenant_stats.lua`` for one tenant."""

    tenant: str
    num_started: int
    blocked_until_ms: float
    limits: tuple[float, int, int, int]
    lanes: list[tuple[str, int, int, float, float]]

    def blocked_for_s(self, now_ms: float) -> float:
        return math.inf if self.blocked_until_ms < 0 else max(0.0, (self.blocked_until_ms - now_ms) / 1000)

    def limits_at(self, now_ms: float) -> Limits:
        weight, requests, tokens, concurrent = self.limits
        return Limits(
            weight=weight,
            requests_per_minute=requests or None,
            tokens_per_minute=tokens or None,
            max_concurrent_requests=concurrent or None,
            num_running=self.num_started,
            blocked_for_s=self.blocked_for_s(now_ms),
        )

    def lane_states(self, now_ms: float) -> list[tuple[str, LaneState]]:
        """Return its lanes, with their bands."""
        return [
            (band, _lane_state(self.tenant, time, depth, num_tokens, self.limits[0], oldest_ms, now_ms))
            for band, depth, num_tokens, oldest_ms, time in self.lanes
        ]


def queue_state(raw: RawMeasures, readiness: Readiness) -> QueueState:
    """Return the state that an estimate of waits needs."""
    num_running = max(0, raw.num_started - raw.num_returned)
    bands = [_band_state(band, raw.now_ms) for band in raw.bands]
    return QueueState(
        is_paused=raw.paused_at_ms > 0,
        ageing_s=raw.ageing_ms / 1000 if raw.ageing_ms >= 0 else None,
        strictness=raw.strictness,
        num_running=num_running,
        num_returned=raw.num_returned,
        num_engines=raw.rooms[0],
        num_seqs=raw.rooms[1],
        num_free=_num_free(raw),
        held_share=_held_share(raw, num_running, sum((band.rates for band in bands), Rates())),
        readiness=readiness,
        bands=bands,
    )


def age_s(now_ms: float, then_ms: float) -> float:
    """Return the seconds since a time; 0 if it is 0."""
    return max(0.0, (now_ms - then_ms) / 1000) if then_ms else 0.0


def _num_free(raw: RawMeasures) -> float:
    """Return the number of requests that engines would claim now: free sequences, limited by their caches."""
    num_engines, seqs, held_seqs, tokens, held_tokens = raw.rooms
    if not num_engines:
        return 0.0
    free = max(0, seqs - held_seqs)
    if held_seqs and held_tokens:
        # On average, each engine's remaining cache is too small for another request.
        fitting = (tokens - held_tokens) / num_engines / (held_tokens / held_seqs)
        free = min(free, max(0.0, math.floor(fitting) * num_engines))
    oldest_ms = min((band.oldest_ms for band in raw.bands if band.oldest_ms), default=raw.now_ms)
    if raw.now_ms - oldest_ms > _NOT_CLAIMED_MS:
        free = max(0, free - num_engines * (seqs // num_engines // SEQS_PER_KEPT_ONE))
    return float(free)


def _held_share(raw: RawMeasures, num_running: int, rates: Rates) -> float:
    """Return how much longer requests are held than those that have ended so far, because short ones end first.

    Running requests are halfway through on average, if they began evenly. The time since the last change of their
    number counts in full: if the sums decayed meanwhile, a single long request would erase those of ended requests.
    """
    if raw.rate_ended_ms <= 0 or rates.ended <= 0:
        return 1.0
    held_ms = raw.rate_held_ms + num_running * max(0.0, raw.now_ms - raw.held_at_ms)
    half_ms = num_running * 1000 * rates.held_s / rates.ended / 2
    return max(1.0, (held_ms - half_ms) / raw.rate_ended_ms)


def _band_state(raw: RawBand, now_ms: float) -> BandState:
    return BandState(
        band=raw.band,
        depth=max(0, raw.depth - raw.num_blocked),
        num_tokens=max(0, raw.num_tokens - raw.num_blocked_tokens),
        age_s=age_s(now_ms, raw.oldest_ms),
        num_tenants=raw.num_tenants,
        rates=_rates(raw, now_ms),
        lanes=[
            _lane_state(tenant, time, depth, num_tokens, weight, oldest_ms, now_ms)
            for tenant, time, depth, num_tokens, weight, oldest_ms in raw.lanes
        ],
    )


def _lane_state(
    tenant: str, time: float, depth: int, num_tokens: int, weight: float, oldest_ms: float, now_ms: float
) -> LaneState:
    return LaneState(
        tenant=tenant,
        depth=depth,
        num_tokens=num_tokens,
        weight=weight,
        age_s=age_s(now_ms, oldest_ms),
        virtual_time=time if time >= 0 else None,
    )


def _rates(raw: RawBand, now_ms: float) -> Rates:
    """Decay the rates that ``measure_band`` of settling.lua wrote until now; zeros if they cannot be read."""
    try:
        at_ms, *sums, entered_before = map(float, raw.rate.split())
        fast_ms, ended, tokens, came, slow_ms, slow_ended, slow_tokens, slow_came, computed, held_ms = sums
    except ValueError:
        return Rates()
    elapsed_ms, came_since = max(0.0, now_ms - at_ms), max(0.0, raw.num_entered - entered_before)
    fast, slow = math.exp(-elapsed_ms / _RATE_WINDOW_MS), math.exp(-elapsed_ms / _WORK_WINDOW_MS)
    fast_s, slow_s = ((ms * fade + elapsed_ms) / 1000 for ms, fade in ((fast_ms, fast), (slow_ms, slow)))
    return Rates(
        ended_per_s=ended * fast / max(_LEAST_WINDOW_S, fast_s),
        tokens_per_s=tokens * fast / max(_LEAST_WINDOW_S, fast_s),
        entered_per_s=(came * fast + came_since) / max(_LEAST_WINDOW_S, fast_s),
        entered_before_per_s=(slow_came * slow + came_since) / max(_LEAST_WINDOW_S, slow_s),
        ended=slow_ended * slow,
        tokens=slow_tokens * slow,
        computed_tokens=computed * slow,
        held_s=held_ms * slow / 1000,
    )
