"""The rule that decides which models of a device are awake. Pure: times are arguments, and no I/O is done.

*The model that has stood longest with work goes next. A model that still has work is left only when the swap debt is
repaid.* ``decisions/device_swaps.md`` has the reasons.

    cost of a swap = sleep_s and recomputation of all that leave + wake_s of the one that enters
    lateness       = max over bands of standing / patience; 1 from when a deadline would otherwise be missed
    debt           = sum of costs - share / (1 - share) x other time, within [-2 x dearest, models x dearest]
    hard debt      = the same for a share of 1/2, never below 0

``dearest`` is the cost of the dearest swap among the models. So over any interval in which the awake model has work,
swaps take at most ``share x interval + 3 x dearest x (1 - share)``, except those for models beyond their max_wait_s,
with which they take at most half of it. A model without work is left at no price. A model that is awake on another
device, too, is left as soon as the debt is repaid, even before the other is late. So of several devices it goes first.
It wakes here only if no working model that this device alone serves must leave.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .budget import Departures, departures
from .views import DeviceView, ModelView, SleepLevel, SwapOptions

CREDIT_SWAPS = 2
# Times within this of each other are equal, so that a decision at ``Stay.until_s`` is not put off by rounding.
ROUNDING_S = 1e-6


class Reason(enum.StrEnum):
    """Reason of a swap, as in logs and metrics."""

    EMPTY = "empty"
    LATE = "late"
    MAX_WAIT = "max_wait"
    IDLE = "idle"
    # An operator asked for it; the rule never returns this.
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Swap:
    """Put ``asleep`` to sleep, end the processes of ``ended``, then wake ``entering`` if it is not None."""

    reason: Reason
    asleep: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    entering: str | None = None


@dataclass(frozen=True, slots=True)
class Stay:
    """Change nothing until ``until_s``, or until requests arrive or end. Infinity if time alone changes nothing."""

    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Debts:
    """Swap time of a device that is not repaid yet, in seconds."""

    soft_s: float = 0.0
    hard_s: float = 0.0

    def after_swap(self, cost_s: float, models: Sequence[ModelView]) -> Debts:
        """Return the debts after a swap that cost ``cost_s``, recomputation included."""
        most_s = len(models) * max(dearest_s(models), cost_s)
        return Debts(min(self.soft_s + cost_s, most_s), min(self.hard_s + cost_s, most_s))

    def after_serving(self, time_s: float, models: Sequence[ModelView], options: SwapOptions) -> Debts:
        """Return the debts after a time without swaps."""
        least_s = -CREDIT_SWAPS * dearest_s(models)
        soft_s = max(min(self.soft_s, least_s), self.soft_s - time_s * repaid_per_s(options))
        return Debts(soft_s, max(0.0, self.hard_s - time_s))


def repaid_per_s(options: SwapOptions) -> float:
    """Return the debt that a second without swaps repays."""
    return options.max_share / (1 - options.max_share)


def dearest_s(models: Sequence[ModelView]) -> float:
    """Return the cost of the dearest swap among models."""
    return max((model.leave_s for model in models), default=0.0) + max((model.wake_s for model in models), default=0.0)


def longest_wait_s(
    num_models: int, dearest: float, options: SwapOptions, band: str, *, is_most_urgent: bool = True
) -> float:
    """Return the longest time from a request's arrival until its model is awake, whatever the load of other models.

    It holds while no process dies. A model finds at most ``num_models`` swaps of debt, and at most as many more happen
    before its own.

    Args:
        dearest: cost of the dearest swap.
        is_most_urgent: whether no model has requests of a band with less patience. If one has, only max_wait_s helps.
    """
    by_debt_s = 2 * num_models * dearest / options.max_share if is_most_urgent else math.inf
    return options.patience_of(band) + min(by_debt_s, options.max_wait_of(band) + 3 * num_models * dearest)


def entry_s(device: DeviceView, models: Sequence[ModelView], entering: ModelView) -> float:
    """Return the time to wake a model, and to put to sleep the models that must leave for it.

    Homes report it, so that a device without work goes first. A model that another device serves, too, counts as none.
    """
    leaving = departures(device, models, entering)
    working = _working(models, leaving, alone=True) if leaving is not None else ()
    return entering.wake_s + sum(model.leave_s for model in working)


def lateness(model: ModelView, now_s: float, options: SwapOptions) -> float:
    """Return how late a sleeping model is: a working model may have to leave for it from 1 on."""
    patience_of = (model.own_options or options).patience_of
    late = max((time_s / patience_of(band) for band, time_s in model.standing_s(now_s).items()), default=0.0)
    left_s = model.deadline_s - now_s
    if not model.is_awake and model.wake_s <= left_s < model.wake_s + model.service_s:
        late = max(late, 1.0)
    return late


def decide(
    now_s: float, device: DeviceView, models: Sequence[ModelView], debts: Debts, options: SwapOptions
) -> Swap | Stay:
    """Return the next swap. Call again when a request arrives or ends, after a swap, and at ``Stay.until_s``."""
    standing = [
        (model, leaving)
        for model in models
        if not model.is_awake and model.oldest_s and model.can_wake
        if (leaving := departures(device, models, model)) is not None
        if not (model.is_elsewhere and _working(models, leaving, alone=True))
    ]
    if not standing:
        return _rest(now_s, models, options)
    entering, leaving = min(standing, key=lambda pair: _rank(pair[0], now_s, options))
    working = _working(models, leaving)
    reason = _reason(now_s, entering, working, debts, options)
    if reason is None:
        return Stay(min(_next_change_s(now_s, model, working, debts, options) for model, _ in standing))
    return Swap(reason, leaving.asleep, leaving.ended, entering.name)


def _working(models: Sequence[ModelView], leaving: Departures, *, alone: bool = False) -> list[ModelView]:
    """Return the models with work that would leave; with ``alone`` those that no other device serves."""
    asleep = [model for model in models if model.name in leaving.asleep and model.has_work]
    return [model for model in asleep if not (alone and model.is_elsewhere)]


def _rank(model: ModelView, now_s: float, options: SwapOptions) -> tuple[float, float, float, str]:
    """Return the order among standing models: those beyond their max_wait_s first, then by lateness."""
    return (-_beyond_s(model, now_s, options), -lateness(model, now_s, options), model.wake_s, model.name)


def _beyond_s(model: ModelView, now_s: float, options: SwapOptions) -> float:
    """Return how long a model has stood that stands beyond a max_wait_s; 0 for another."""
    times = model.standing_s(now_s).items()
    return max((time_s for band, time_s in times if time_s >= options.max_wait_of(band) - ROUNDING_S), default=0.0)


def _reason(
    now_s: float, entering: ModelView, working: Sequence[ModelView], debts: Debts, options: SwapOptions
) -> Reason | None:
    """Return why the working models may be left now; None if they may not."""
    if not working:
        return Reason.EMPTY
    if lateness(entering, now_s + ROUNDING_S, options) < 1 and not _are_elsewhere(working):
        return None
    if debts.soft_s <= ROUNDING_S and now_s >= _may_leave_s(working, options) - ROUNDING_S:
        return Reason.LATE
    if debts.hard_s <= ROUNDING_S and _beyond_s(entering, now_s, options) > 0:
        return Reason.MAX_WAIT
    return None


def _may_leave_s(working: Sequence[ModelView], options: SwapOptions) -> float:
    """Return when working models have stayed for their least time."""
    return max(
        max(model.since_s + (model.own_options or options).min_awake_s, model.stays_until_s) for model in working
    )


def _are_elsewhere(working: Sequence[ModelView]) -> bool:
    """Return whether other devices serve all that would leave. Those leave before the patience of others ends."""
    return all(model.is_elsewhere for model in working)


def _next_change_s(
    now_s: float, model: ModelView, working: Sequence[ModelView], debts: Debts, options: SwapOptions
) -> float:
    """Return when a standing model may be the cause of a swap, if nothing else happens."""
    since_s = {band: now_s - time_s for band, time_s in model.standing_s(now_s).items()}
    patience_of = (model.own_options or options).patience_of
    late_s = min(at_s + patience_of(band) for band, at_s in since_s.items())
    if _are_elsewhere(working):
        late_s = now_s
    if model.deadline_s - model.wake_s >= now_s:
        late_s = min(late_s, model.deadline_s - model.wake_s - model.service_s)
    repaid_s = max(
        now_s + debts.soft_s / repaid_per_s(options),
        _may_leave_s(working, options),
    )
    beyond_s = min(at_s + options.max_wait_of(band) for band, at_s in since_s.items())
    return min(max(late_s, repaid_s), max(beyond_s, now_s + debts.hard_s))


def _rest(now_s: float, models: Sequence[ModelView], options: SwapOptions) -> Swap | Stay:
    """Put idle models to sleep while no model stands, and later end their processes."""
    next_s = math.inf
    for model in sorted(models, key=lambda model: (model.used_s, model.name)):
        if model.is_pinned or model.has_requests or model.level is SleepLevel.DISK:
            continue
        asleep_s = model.used_s + options.idle_sleep_s if model.is_awake and options.idle_sleep_s else math.inf
        ended_s = model.used_s + options.idle_unload_s if options.idle_unload_s else math.inf
        asleep_s, ended_s = max(asleep_s, model.stays_until_s), max(ended_s, model.stays_until_s)
        if ended_s <= now_s:
            return Swap(Reason.IDLE, ended=(model.name,))
        if asleep_s <= now_s:
            return Swap(Reason.IDLE, asleep=(model.name,))
        next_s = min(next_s, asleep_s, ended_s)
    return Stay(next_s)
