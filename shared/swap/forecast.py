"""Forecast of when sleeping models wake: the rule played forward from the state of a device. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .rule import Debts, Stay, Swap, dearest_s, decide, longest_wait_s
from .views import DeviceView, ModelView, SleepLevel, SwapOptions

# Band of the request that a model without requests is forecast for.
_BAND = "standard"
# Decisions that are played, and weight of the newest turn among all of a model.
_STEPS_PER_MODEL = 6
_NEWEST_SHARE = 0.3
_LEAST_STEP_S = 1e-3


class Turns:
    """Time for which models have work while they are awake, learned from their turns."""

    def __init__(self) -> None:
        self._work_s: dict[str, float] = {}

    def record_turn(self, leaving: ModelView) -> None:
        """Record the turn of a model that is put to sleep. One that still has work counts for twice its turn."""
        worked_s = max(0.0, leaving.used_s - leaving.since_s) * (2 if leaving.has_work else 1)
        before_s = self._work_s.get(leaving.name, worked_s)
        self._work_s[leaving.name] = before_s + _NEWEST_SHARE * (worked_s - before_s)

    def work_s(self, model: str) -> float | None:
        """Return the expected time; None before its first turn."""
        return self._work_s.get(model)


def time_left_s(expected_s: float, elapsed_s: float) -> float:
    """Return the time that a wake still takes. One that is overdue is expected to take as long again."""
    return expected_s - elapsed_s if elapsed_s < expected_s else elapsed_s


def ready_in_s(
    now_s: float, device: DeviceView, models: Sequence[ModelView], debts: Debts, options: SwapOptions, turns: Turns
) -> dict[str, float]:
    """Return for each sleeping model the expected time until it is awake, if no further request arrives.

    A model without requests is forecast as if one arrived now. A model that cannot wake is absent. One that is to be
    put to sleep now is forecast, too.
    """
    asleep = [model for model in models if not model.is_awake and model.can_wake]
    forecast = _Forecast(now_s, device, models, debts, options, turns).waits_s({model.name for model in asleep})
    for model in asleep:
        if not model.oldest_s:
            with_request = [replace(one, oldest_s={_BAND: now_s}) if one is model else one for one in models]
            forecast |= _Forecast(now_s, device, with_request, debts, options, turns).waits_s({model.name})
    return forecast


class _Forecast:
    """A device whose time is played forward."""

    def __init__(
        self,
        now_s: float,
        device: DeviceView,
        models: Sequence[ModelView],
        debts: Debts,
        options: SwapOptions,
        turns: Turns,
    ) -> None:
        self._start_s = self._now_s = now_s
        self._device = device
        self._at_start = {model.name: model for model in models}
        self._models = dict(self._at_start)
        self._debts = debts
        self._options = options
        self._turns = turns
        # When the work of an awake model ends.
        self._ends_s = {model.name: self._work_ends_s(model) for model in models if model.is_awake and model.has_work}

    def waits_s(self, names: set[str]) -> dict[str, float]:
        """Return the time until each of these models is awake. One that does not wake is absent."""
        times_s: dict[str, float] = {}
        missing = {name for name in names if self._models[name].oldest_s}
        for _ in range(_STEPS_PER_MODEL * len(self._models)):
            if not missing:
                break
            choice = decide(self._now_s, self._device, self._views, self._debts, self._options)
            if isinstance(choice, Swap):
                if self._now_s == self._start_s:
                    missing |= {name for name in choice.asleep if self._models[name].has_requests}
                self._swap(choice)
                if choice.entering in missing:
                    missing.discard(choice.entering)
                    times_s[choice.entering] = self._now_s - self._start_s
            elif not self._stay(choice):
                break
        return {name: min(wait_s, self._longest_s(name)) for name, wait_s in times_s.items()}

    @property
    def _views(self) -> list[ModelView]:
        return [*self._models.values()]

    def _longest_s(self, name: str) -> float:
        """Return the longest time from the start on that the rule allows."""
        model = self._at_start[name]
        own_options = model.own_options or self._options
        standing_s = model.standing_s(self._start_s) or dict.fromkeys(model.oldest_s or (_BAND,), 0.0)
        most_urgent_s = min(
            [
                *map(own_options.patience_of, standing_s),
                *(
                    (one.own_options or self._options).patience_of(band)
                    for one in self._at_start.values()
                    for band in one.oldest_s
                ),
            ]
        )
        number, dearest = len(self._at_start), dearest_s([*self._at_start.values()])
        # Debt gives no bound while a model stays for an operator.
        is_bounded = not any(one.stays_until_s for one in self._at_start.values())
        return max(
            0.0,
            min(
                longest_wait_s(
                    number,
                    dearest,
                    own_options,
                    band,
                    is_most_urgent=is_bounded and own_options.patience_of(band) == most_urgent_s,
                )
                - time_s
                for band, time_s in standing_s.items()
            ),
        )

    def _stay(self, stay: Stay) -> bool:
        """Let time pass until the next decision, or the end of a model's work; False if neither comes."""
        until_s = min([stay.until_s, *self._ends_s.values()])
        if until_s == math.inf:
            return False
        time_s = max(_LEAST_STEP_S, until_s - self._now_s)
        self._debts = self._debts.after_serving(time_s, self._views, self._options)
        self._now_s += time_s
        for name in [name for name, end_s in self._ends_s.items() if end_s <= self._now_s]:
            del self._ends_s[name]
            self._models[name] = replace(
                self._models[name], oldest_s={}, num_running=0, used_s=self._now_s, stays_until_s=0.0
            )
        return True

    def _swap(self, swap: Swap) -> None:
        leaving = [self._models[name] for name in swap.asleep]
        views = self._views
        relost_s = sum(model.relost_s for model in leaving)
        start_s = self._now_s
        for model in leaving:
            self._now_s += model.sleep_s
            self._ends_s.pop(model.name, None)
            self._models[model.name] = _asleep(model, self._now_s)
        for name in swap.ended:
            self._models[name] = replace(self._models[name], level=SleepLevel.DISK)
        if swap.entering is not None:
            model = self._models[swap.entering]
            self._now_s += model.wake_s
            self._models[model.name] = awake = replace(
                model, level=SleepLevel.AWAKE, since_s=self._now_s, used_s=self._now_s
            )
            self._ends_s[model.name] = self._work_ends_s(awake)
        self._debts = self._debts.after_swap(self._now_s - start_s + relost_s, views)

    def _work_ends_s(self, model: ModelView) -> float:
        """Return when the work of an awake model is expected to end: half a turn from now on at the earliest.

        The first turn of a model is expected to be as long as a swap.
        """
        work_s = self._turns.work_s(model.name)
        if work_s is None:
            work_s = dearest_s([*self._at_start.values()])
        return max(model.since_s + work_s, self._now_s + work_s / 2, model.stays_until_s)


def _asleep(model: ModelView, now_s: float) -> ModelView:
    """Return a model that has just gone to sleep. Its running requests wait again."""
    return replace(
        model,
        level=SleepLevel.HOST_MEMORY,
        since_s=now_s,
        used_s=now_s,
        oldest_s=model.oldest_s or ({_BAND: now_s} if model.num_running else {}),
        num_running=0,
        stays_until_s=0.0,
        can_wake=not model.is_elsewhere,
        wake_s=model.wake_s or min(model.wake_s_of.values(), default=0.0),
    )
