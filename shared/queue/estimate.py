"""How long requests are going to wait. Pure: nothing is read here, and no time passes.

A *slot* is a sequence of an engine. Work is counted in seconds of a slot. A request of a band is as much work as
engines have lately held such requests for, and each slot does one second of work a second. The rules of the claim
script (ops/decisions/fairness.md) say who gets it:

    bands      the highest with work goes first; while work below it has aged, it keeps ``strictness`` of what it gets
    tenants    the lane with the least virtual time goes first, so a request starts once its band has served all lanes
               up to the virtual time of its turn
    quotas     a tenant starts nothing sooner than its quotas allow

Requests that are still to come take their part, too: ``_Shares`` plays the bands forward as fluids, with arrivals as
in the last half minute at first, and as in the last five minutes later. While a model sleeps, one engine is expected at
the time that its device has forecast (``shared/swap/forecast.py``). Other engines that have not begun are not known.
An estimate is a mean, and no bound.

The reasons, the measured error and the cost are in ops/decisions/wait_estimates.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

import msgspec

from .state import BandState, LaneState, Limits, QueueState, Rates

# A longer wait is unknown, because arrivals cannot be predicted.
HORIZON_S = 24 * 3600.0
# Between two moments of the fluids: the first of them, and as a share of the time that has passed.
_STEP_S, _STEP_SHARE = 0.1, 0.03
# Factor by which the requested tokens of a lane change the work of its requests, compared with its band's.
_MOST_SIZE = 4.0
# Moments at which the age of a band's oldest request is computed.
_HEAD_STEPS = 12
# Sequences of an engine that has not started yet.
_USUAL_SEQS = 64
# Lanes of a band whose waits are computed; those of others are interpolated.
_MAX_LANES = 12


class _Work(msgspec.Struct, frozen=True):
    """Work of a band's request: seconds of a slot, computed tokens, and requested tokens."""

    held_s: float
    computed_tokens: float
    tokens: float

    def size(self, depth: int, num_tokens: int) -> float:
        """Return how much larger than the mean request one of ``num_tokens`` is."""
        if not depth or not num_tokens or not self.tokens:
            return 1.0
        return min(_MOST_SIZE, max(1 / _MOST_SIZE, num_tokens / depth / self.tokens))


class Estimator:
    """Waits in a queue, from one snapshot of it."""

    def __init__(self, state: QueueState) -> None:
        # Until a sleeping model is awake, its engine counts as free, and the time until then is added.
        self._is_asleep = not state.num_engines and state.readiness.in_s is not None
        self._ready_in_s = 0.0
        if self._is_asleep:
            self._ready_in_s, num_seqs = state.readiness.in_s or 0.0, state.readiness.num_seqs or _USUAL_SEQS
            state = msgspec.structs.replace(state, num_engines=1, num_seqs=num_seqs, num_free=num_seqs)
        self._state = state
        self._index = {band.band: level for level, band in enumerate(state.bands)}
        self._works = _works(state)
        # Engines that have just ended all that they ran say so with their next claim.
        self._num_slots = state.num_running + state.num_free or state.num_seqs
        self._shares = _Shares(state, self._works, self._num_slots) if self._is_known else None

    @property
    def _is_known(self) -> bool:
        return bool(self._works) and self._num_slots > 0 and self._is_open

    @property
    def _is_open(self) -> bool:
        return self._state.num_engines > 0 and not self._state.is_paused

    @property
    def tokens_per_s(self) -> float:
        """Tokens, prompts and ``max_tokens``, that engines serve if all slots are taken; 0 if that is unknown."""
        if self._is_asleep:
            return 0.0
        rates = [band.rates for band in self._state.bands]
        held_s = sum(one.held_s for one in rates) * self._state.held_share
        return self._num_slots * sum(one.tokens for one in rates) / held_s if held_s > 0 else 0.0

    def band_s(self, band: str) -> float | None:
        """Return the wait of a new request in the middle of its band: half of them wait for less.

        Without lanes, as if all tenants were one.
        """
        if (level := self._index.get(band)) is None:
            return None
        state = self._state.bands[level]
        lanes = [lane for lane in state.lanes if lane.virtual_time is not None]
        if lanes and self._works:
            return self._middle_s(level, lanes)
        work = self._works[level] if self._works else None
        needed_s = max(0, state.depth - 1) * work.held_s * work.size(state.depth, state.num_tokens) if work else 0.0
        return self._wait_s(level, lambda _: needed_s)

    def _middle_s(self, level: int, lanes: Sequence[LaneState]) -> float | None:
        """Half of what comes to a band waits for less, if it comes to its lanes as it did."""
        state, work = self._state.bands[level], self._works[level]
        coming = _Coming(state, lanes)
        waits = self.lanes_s(state.band, [(lane, Limits(weight=lane.weight)) for lane in lanes])
        of_new = self._wait_s(level, _Turn(state, work, LaneState(tenant="", depth=0, num_tokens=0), 0).needed_s)
        pairs = [*zip(waits, coming.grown_per_s, strict=True), (of_new, coming.new_per_s / coming.scale)]
        pairs.sort(key=lambda pair: math.inf if pair[0] is None else pair[0])
        half = sum(per_s for _, per_s in pairs) / 2
        for wait_s, per_s in pairs:
            half -= per_s
            if half <= 0:
                return wait_s
        return pairs[-1][0]

    def lane_s(self, band: str, lane: LaneState, limits: Limits, num_ahead: int | None = None) -> float | None:
        """Wait of a tenant's request with ``num_ahead`` others of its lane before it; by default its newest."""
        if (level := self._index.get(band)) is None:
            return None
        ahead = max(0, lane.depth - 1) if num_ahead is None else num_ahead
        if not self._works:
            return self._wait_s(level, lambda _: 0.0)
        turn = _Turn(self._state.bands[level], self._works[level], lane, ahead)
        return _with_quotas(self._wait_s(level, turn.needed_s), self._works[level], limits, ahead)

    def lanes_s(self, band: str, lanes: Sequence[tuple[LaneState, Limits]]) -> list[float | None]:
        """Waits of the newest of each lane, in order. Of many lanes some are computed, the others interpolated."""
        if len(lanes) <= _MAX_LANES or not self._works:
            return [self.lane_s(band, lane, limits) for lane, limits in lanes]
        level = self._index[band]
        state, work = self._state.bands[level], self._works[level]
        times = [_turn_at(state, work, lane, max(0, lane.depth - 1)) for lane, _ in lanes]
        order = sorted(range(len(lanes)), key=lambda number: times[number])
        computed: list[tuple[float, float | None]] = []
        for place in range(_MAX_LANES):
            lane = lanes[number := order[place * (len(order) - 1) // (_MAX_LANES - 1)]][0]
            turn = _Turn(state, work, lane, max(0, lane.depth - 1))
            computed.append((times[number], self._wait_s(level, turn.needed_s)))
        return [
            _with_quotas(_interpolated(computed, at), work, limits, max(0, lane.depth - 1))
            for at, (lane, limits) in zip(times, lanes, strict=True)
        ]

    def returned_s(self, num_ahead: int) -> float | None:
        """Wait of a request that waits for another engine, behind ``num_ahead`` others of its kind."""
        if not self._is_open:
            return None
        if num_ahead < self._state.num_free:
            return self._ready_in_s
        if not self._works or not self._num_slots:
            return None
        return self._ready_in_s + (num_ahead + 1 - self._state.num_free) * _mean_held_s(self._state) / self._num_slots

    def _wait_s(self, level: int, needed_s: Callable[[float], float]) -> float | None:
        if not self._is_open:
            return None
        waiting = self._state.num_returned + sum(band.depth for band in self._state.bands[: level + 1])
        if max(1, waiting) <= self._state.num_free:
            return self._ready_in_s
        if self._shares is None:
            return self._ready_in_s if self._is_asleep else None
        wait_s = self._shares.when(level, needed_s)
        return None if wait_s is None else self._ready_in_s + wait_s


class _Coming:
    """Arrivals of a band by lane: as each lane has grown, and no more in all than the band was measured to get.

    ``lanes`` stand for ``scale`` times as many. What else comes is of tenants that have nothing in line now.
    """

    def __init__(self, band: BandState, lanes: Sequence[LaneState]) -> None:
        self.scale = max(1.0, band.num_tenants / len(lanes)) if lanes else 1.0
        self.grown_per_s = [lane.depth / max(lane.age_s, 1.0) for lane in lanes]
        total = self.scale * sum(self.grown_per_s)
        entered_per_s = band.rates.entered_per_s
        share = min(1.0, entered_per_s / total) if total else 0.0
        self.per_s = [per_s * share for per_s in self.grown_per_s]
        self.new_per_s = max(0.0, entered_per_s - total)


class _Turn:
    """The turn of a request: the virtual time of its lane, and the work that its band serves before."""

    def __init__(self, band: BandState, work: _Work, lane: LaneState, num_ahead: int) -> None:
        self._work = work
        self._own_tokens = num_ahead * _request_tokens(work, lane)
        self._at = _turn_at(band, work, lane, num_ahead)
        lanes = [other for other in band.lanes if other.virtual_time is not None]
        coming = _Coming(band, lanes)
        self._scale = coming.scale
        self._new_per_s = coming.new_per_s * work.computed_tokens
        self._others = [
            self._part_of_other(other, per_s)
            for other, per_s in zip(lanes, coming.per_s, strict=True)
            if other.tenant != lane.tenant
        ]

    def _part_of_other(self, other: LaneState, arrivals_per_s: float) -> tuple[float, float, float]:
        """Return of another lane: tokens up to this turn, waiting tokens, and arriving tokens per second."""
        tokens = _request_tokens(self._work, other)
        ahead = self._at - (other.virtual_time or 0.0)
        # It starts whole requests, so half a request beyond on the average.
        most = ahead * other.weight + tokens / 2 if ahead >= 0 else 0.0
        return most, other.depth * tokens, arrivals_per_s * tokens

    def needed_s(self, after_s: float) -> float:
        """Return the work that the band does before, if the turn comes after this time."""
        before = sum(min(most, waiting + per_s * after_s) for most, waiting, per_s in self._others)
        tokens = self._own_tokens + self._scale * before + self._new_per_s * after_s
        return tokens * self._work.held_s / self._work.computed_tokens


def _turn_at(band: BandState, work: _Work, lane: LaneState, num_ahead: int) -> float:
    """The virtual time of a turn. A tenant over a quota, or without a lane, comes in with the least time there is."""
    own = lane.virtual_time
    if own is None:
        own = min((other.virtual_time for other in band.lanes if other.virtual_time is not None), default=0.0)
    return own + num_ahead * _request_tokens(work, lane) / lane.weight


class _Shares:
    """The work that each band can have done by a time, if some of its requests wait until then."""

    def __init__(self, state: QueueState, works: Sequence[_Work], num_slots: float) -> None:
        self._state = state
        self._num_slots = num_slots
        self._works = works
        self._left_s = [
            band.depth * work.size(band.depth, band.num_tokens) * work.held_s
            for band, work in zip(state.bands, works, strict=True)
        ]
        # Where nothing waits, a request that comes now ages alone.
        for level in reversed(range(len(works))):
            if state.bands[level].depth:
                break
            self._left_s[level] = works[level].held_s
        self._began_s = list(self._left_s)
        self._head_ages = [_head_ages(band) for band in state.bands]
        self._done_s = [0.0] * len(works)
        self._times = [0.0]
        # Slots get free by the requests that run, whatever those that wait are like.
        self._slot_s = _mean_held_s(state)
        self._owed_s = max(0.0, state.num_returned - state.num_free) * self._slot_s
        free_s = max(0.0, state.num_free - state.num_returned) * self._slot_s
        self._can = [self._share_out(free_s, 0.0, 0.0)]

    def when(self, level: int, needed_s: Callable[[float], float]) -> float | None:
        """When the band ``level`` has had ``needed_s(when)`` done and a slot for one more; None if nobody knows."""

        def surplus(number: int) -> float | None:
            while len(self._times) <= number:
                if self._times[-1] > HORIZON_S:
                    return None
                self._step()
            return self._can[number][level] - self._slot_s - needed_s(self._times[number])

        number, last = 0, -1
        while (at := surplus(number)) is not None and at < 0:
            last, number = number, max(1, 2 * number)
        if at is None:
            number = len(self._times) - 1
            if (surplus(number) or -1.0) < 0:
                return None
        while number - last > 1:
            middle = (number + last) // 2
            if (surplus(middle) or 0.0) < 0:
                last = middle
            else:
                number = middle
        if number == 0:
            return 0.0
        before, after = surplus(number - 1) or 0.0, surplus(number) or 0.0
        step_s = self._times[number] - self._times[number - 1]
        return self._times[number - 1] + step_s * (-before / (after - before) if after > before else 1.0)

    def _step(self) -> None:
        now_s = self._times[-1]
        step_s = max(_STEP_S, _STEP_SHARE * now_s)
        work_s = self._num_slots * step_s
        repaid_s = min(work_s, self._owed_s)
        self._owed_s -= repaid_s
        more = self._share_out(work_s - repaid_s, now_s, step_s)
        self._times.append(now_s + step_s)
        self._can.append([before + new for before, new in zip(self._can[-1], more, strict=True)])

    def _share_out(self, work_s: float, now_s: float, step_s: float) -> list[float]:
        """Give the bands work that is done in a step; returns what each could have had."""
        for level, (band, work) in enumerate(zip(self._state.bands, self._works, strict=True)):
            self._left_s[level] += band.rates.entered_per_s_after(now_s) * work.held_s * step_s
        could: list[float] = []
        unused: list[float] = []
        for level in range(len(self._works)):
            own_s = work_s * (self._state.strictness if self._has_aged_below(level, now_s) else 1.0)
            done_s = self._do(level, own_s)
            could.append(own_s)
            unused.append(own_s - done_s)
            work_s -= done_s
        # What no band below needs goes to those that had kept a share only.
        could = [own_s + max(0.0, work_s - own_unused_s) for own_s, own_unused_s in zip(could, unused, strict=True)]
        for level in range(len(self._works)):
            work_s -= self._do(level, work_s)
        return could

    def _do(self, level: int, work_s: float) -> float:
        done_s = min(self._left_s[level], work_s)
        self._left_s[level] -= done_s
        self._done_s[level] += done_s
        return done_s

    def _has_aged_below(self, level: int, now_s: float) -> bool:
        ageing_s = self._state.ageing_s
        if ageing_s is None:
            return False
        return any(
            now_s - self._head_came_at_s(lower) >= ageing_s * (lower - level)
            for lower in range(level + 1, len(self._works))
            if self._left_s[lower] > 0
        )

    def _head_came_at_s(self, level: int) -> float:
        """When the oldest of a band came, below 0 before this look; at the latest now, as what is asked about does."""
        share = self._done_s[level] / self._began_s[level] if self._began_s[level] else 1.0
        return -(_interpolated(self._head_ages[level], share) or 0.0) if share < 1 else 0.0


def _head_ages(band: BandState) -> list[tuple[float, float]]:
    """The age that the oldest of a band has now, by the share of the band that is done before its turn.

    Tenants are served side by side, by their weights. So the oldest is one of the lane with most for its weight, and
    stays for longer than in a single line.
    """
    lanes = [lane for lane in band.lanes if lane.depth]
    total = sum(lane.depth for lane in lanes)
    if not lanes:
        return [(0.0, band.age_s), (1.0, 0.0)]
    most = max(lane.depth / lane.weight for lane in lanes)
    ages: list[tuple[float, float]] = []
    for number in range(_HEAD_STEPS):
        turns = most * number / _HEAD_STEPS
        served = sum(min(lane.depth, turns * lane.weight) for lane in lanes) / total
        ages.append((served, max(lane.age_s * (1 - min(1.0, turns * lane.weight / lane.depth)) for lane in lanes)))
    return [*ages, (1.0, 0.0)]


def _works(state: QueueState) -> list[_Work]:
    """Return the work of a request of each band; the mean if none of the band has ended. Empty if none has at all."""
    rates = [band.rates for band in state.bands]
    whole = sum(rates, Rates())
    return [_work(one if one.ended > 0 else whole, state.held_share) for one in rates] if whole.ended > 0 else []


def _mean_held_s(state: QueueState) -> float:
    whole = sum((band.rates for band in state.bands), Rates())
    return whole.held_s / whole.ended * state.held_share


def _work(rates: Rates, held_share: float) -> _Work:
    return _Work(
        held_s=max(1e-6, rates.held_s / rates.ended * held_share),
        computed_tokens=max(1.0, rates.computed_tokens / rates.ended),
        tokens=rates.tokens / rates.ended,
    )


def _request_tokens(work: _Work, lane: LaneState) -> float:
    """Tokens that a request of a lane is likely to be charged."""
    return work.computed_tokens * work.size(lane.depth, lane.num_tokens)


def _with_quotas(wait_s: float | None, work: _Work, limits: Limits, num_ahead: int) -> float | None:
    """The later of a wait and the time at which quotas let a tenant start one more after ``num_ahead`` others."""
    if wait_s is None:
        return None
    is_blocked = limits.blocked_for_s > 0
    waits = [wait_s, limits.blocked_for_s if math.isfinite(limits.blocked_for_s) else 0.0]
    for amount, limit in (
        (num_ahead, limits.requests_per_minute),
        (num_ahead * work.computed_tokens, limits.tokens_per_minute),
    ):
        if limit is not None:
            minutes = amount / limit if is_blocked else max(0.0, amount / limit - 1)
            waits.append((limits.blocked_for_s if math.isfinite(limits.blocked_for_s) else 0.0) + 60 * minutes)
    if (most := limits.max_concurrent_requests) is not None:
        waits.append(max(0, limits.num_running + num_ahead - most + 1) * work.held_s / most)
    return max(waits)


def _interpolated(known: Sequence[tuple[float, float | None]], at: float) -> float | None:
    """A value between the two neighbours of ``at`` in ``known``, which is in order."""
    place = bisect_left(known, at, key=lambda pair: pair[0])
    if place == 0 or place == len(known):
        return known[min(place, len(known) - 1)][1]
    (before, low), (after, high) = known[place - 1], known[place]
    if low is None or high is None or after <= before:
        return high
    return low + (high - low) * (at - before) / (after - before)
