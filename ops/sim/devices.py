"""Devices that several models share, one awake at a time: in virtual time what a supervisor's keeper does.

A model that sleeps has no engine here: a new one starts when it wakes. The device reads demands and asks for grants by
the scripts of the queue, so devices of several hosts share the models without a leader.
"""

from __future__ import annotations

import math
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any, TypeVar

import simpy

from ...shared.broker import LEASE_TTL_MS, REAP_INTERVAL_S, Demand, Grant, Homes
from ...shared.swap.forecast import Turns, ready_in_s
from ...shared.swap.rule import Debts, Reason, Stay, Swap, entry_s, longest_wait_s
from ...shared.swap.views import DeviceView, Memory, ModelView, SleepLevel
from .engine import Engine
from .fleet import Fleet
from .measures import Loss
from .scenario import Deaths, Engines, Scenario, SwapRule
from .swap_rules import RULES
from .world import Partition, Process

T = TypeVar("T")
# Interval of decisions while a request waits, and of renewals of homes.
LOOK_EVERY_S = 0.25
RENEW_EVERY_S = LEASE_TTL_MS / 1000 / 3
_ONE_MODEL = DeviceView(memory=1)


@dataclass(frozen=True, slots=True)
class DoneSwap:
    """A swap: its time, its cost with recomputation, and its reason."""

    start_s: float
    end_s: float
    cost_s: float
    entering: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Wait:
    """Time for which a model had waiting requests before it woke, or until the end."""

    model: str
    band: str
    wait_s: float


@dataclass
class SwapLog:
    """Swaps and waits of one device.

    Args:
        extra_s: time that other devices may add to a wait: a home that goes first, and one that dies.
        num_deaths: deaths of devices. A death adds at most one bound to a wait.
    """

    kind: Engines
    swaps: list[DoneSwap] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    dearest_s: float = 0.0
    extra_s: float = 0.0
    num_deaths: int = 0

    @property
    def swap_s(self) -> float:
        return sum(swap.end_s - swap.start_s for swap in self.swaps)

    def longest_waits(self) -> dict[str, Wait]:
        """Return the longest wait of each band."""
        longest: dict[str, Wait] = {}
        for wait in self.waits:
            if wait.band not in longest or wait.wait_s > longest[wait.band].wait_s:
                longest[wait.band] = wait
        return longest

    def bound_s(self, band: str) -> float:
        """Return the longest wait of a model that the rule allows, with the dearest swap of the simulation."""
        options = self.kind.swaps.options
        bands = {wait.band for wait in self.waits}
        is_most_urgent = options.patience_of(band) == min(map(options.patience_of, bands))
        num_models = len(self.kind.models)
        alone_s = longest_wait_s(num_models, self.dearest_s, options, band, is_most_urgent=is_most_urgent)
        return (1 + self.num_deaths) * (alone_s + self.extra_s)


class Device:
    """An engine of several models.

    Args:
        name: name of the device among the homes of its models.
        fleets: fleet of each model.
    """

    def __init__(self, env: simpy.Environment, name: str, kind: Engines, fleets: Mapping[str, Fleet]) -> None:
        self.log = SwapLog(kind)
        self._env = env
        self._name = name
        self._kind = kind
        self._fleets = {model: fleets[model] for model in kind.models}
        self._homes = {
            model: Homes(_queue(fleet).connection, _queue(fleet).keys) for model, fleet in self._fleets.items()
        }
        self._decide = RULES[kind.swaps.rule]
        self._debts = Debts()
        self._since_s = dict.fromkeys(kind.models, 0.0)
        self._used_s = dict.fromkeys(kind.models, 0.0)
        self._ask_again_s = dict.fromkeys(kind.models, 0.0)
        self._turns = Turns()
        # Time at which each sleeping model is expected to be awake.
        self._ready_at_s: dict[str, float] = {}
        self._forecast_s = -math.inf
        self._awake: tuple[str, Engine] | None = None
        self._num_wanted = dict.fromkeys(kind.models, 1)
        self._entry_s = dict.fromkeys(kind.models, kind.swaps.wake_s)
        # Since when each model needs one more engine than there are.
        self._needed_s: dict[str, float] = {}
        # When each model was last seen awake on another device.
        self._elsewhere_s = dict.fromkeys(kind.models, 0.0)
        self._change = env.event()
        self.is_alive = True
        # The model that it wakes now.
        self.waking: str | None = None
        self._deciding = env.process(self._run())
        for model in kind.models:
            env.process(self._renew_home(model))

    @property
    def awake(self) -> str | None:
        """Return the model that is awake, or falls asleep."""
        return self._awake[0] if self._awake is not None else None

    @property
    def is_free(self) -> bool:
        """Whether the device lives, swaps nothing, and has no running request."""
        return self.is_alive and self.waking is None and (self._awake is None or not self._awake[1].running)

    def die(self, loss: Loss) -> None:
        """Disappear with the engine. Others notice it when leases end."""
        self.is_alive = False
        self._deciding.interrupt()
        if self._awake is not None:
            model, engine = self._awake
            self._fleets[model].kill(engine, loss)

    def notify(self) -> None:
        """Decide again, because a request arrived or ended."""
        if not self._change.triggered:
            self._change.succeed()

    def end(self) -> None:
        """Record the waits of models that still sleep."""
        for view in self._views() if self.is_alive else ():
            if not self._fleets[view.name].serving:
                self._record_wait(view, self._env.now)

    def _run(self) -> Process:
        try:
            yield from self._decide_forever()
        except simpy.Interrupt:
            assert not self.is_alive

    def _decide_forever(self) -> Process:
        while True:
            views, self._change = self._views(), self._env.event()
            choice = self._decide(self._env.now, _ONE_MODEL, views, self._debts, self._kind.swaps.options)
            if self._env.now >= self._forecast_s + RENEW_EVERY_S or isinstance(choice, Swap):
                self._forecast(views)
            if isinstance(choice, Swap):
                entering = next(view for view in views if view.name == choice.entering)
                if self._is_granted(entering):
                    yield from self._swap(choice, views, entering)
                continue
            self._limit_claims(views)
            yield from self._stay(choice, views)

    def _stay(self, stay: Stay, views: list[ModelView]) -> Process:
        started_s = self._env.now
        # Requests that wait for a model with an engine elsewhere publish nothing, so demands are read again.
        until_s = min(stay.until_s, started_s + LOOK_EVERY_S)
        yield self._change | self._env.timeout(max(1e-6, until_s - started_s))
        self._debts = self._debts.after_serving(self._env.now - started_s, views, self._kind.swaps.options)

    def _forecast(self, views: list[ModelView]) -> None:
        """Forecast when sleeping models wake, if the rule is Penstock's."""
        if self._kind.swaps.rule is not SwapRule.STANDING:
            return
        now_s, self._forecast_s = self._env.now, self._env.now
        waits_s = ready_in_s(now_s, _ONE_MODEL, views, self._debts, self._kind.swaps.options, self._turns)
        self._ready_at_s = {model: now_s + wait_s for model, wait_s in waits_s.items()}

    def _views(self) -> list[ModelView]:
        views = [self._view(model, self._do(model, self._homes[model].demand())) for model in self._kind.models]
        self._entry_s = {view.name: entry_s(_ONE_MODEL, views, view) for view in views}
        return views

    def _view(self, model: str, demand: Demand) -> ModelView:
        now_s, swaps = self._env.now, self._kind.swaps
        engine = self._engine_of(model)
        running = list(engine.running.values()) if engine else []
        if running or demand.oldest_age_s:
            self._used_s[model] = now_s
        is_elsewhere = demand.num_engines > (engine is not None)
        if is_elsewhere:
            self._elsewhere_s[model] = now_s
        elif engine is None:
            self._since_s[model] = max(self._since_s[model], self._elsewhere_s[model])
        self._num_wanted[model] = demand.num_engines_wanted(swaps.options)
        is_wanted = self._num_wanted[model] > demand.num_engines_without(self._name)
        if is_wanted and demand.oldest_age_s:
            self._needed_s.setdefault(model, now_s)
        else:
            self._needed_s.pop(model, None)
        return ModelView(
            name=model,
            level=_level_of(engine),
            since_s=self._since_s[model],
            oldest_s={band: now_s - age_s for band, age_s in demand.oldest_age_s.items()},
            num_running=len(running),
            deadline_s=now_s + demand.deadline_in_s,
            can_wake=now_s >= self._ask_again_s[model] and is_wanted,
            is_elsewhere=is_elsewhere,
            wake_s=swaps.wake_s,
            sleep_s=swaps.sleep_s,
            relost_s=sum(one.num_context for one in running) * self._kind.speed.ms_per_prompt_token / 1000,
            used_s=self._used_s[model],
            memory=Memory(awake=1),
        )

    def _is_granted(self, view: ModelView) -> bool:
        """Ask to wake a model. If another device goes first, the model does not count for a time."""
        grant = self._request_grant(view)
        if not grant.is_granted:
            self._ask_again_s[view.name] = self._env.now + max(grant.wait_s, LOOK_EVERY_S)
        return grant.is_granted

    def _request_grant(self, view: ModelView) -> Grant:
        request = self._homes[view.name].request_grant(
            self._name,
            self._entry_s[view.name],
            waited_s=self._env.now - self._needed_s[view.name],
            patience_s=min(self._kind.swaps.options.patience_of(band) for band in view.oldest_s),
            num_engines=self._num_wanted[view.name],
        )
        return self._do(view.name, request)

    def _renew_grant(self, view: ModelView) -> Process:
        while self.is_alive and self.waking == view.name:
            self._request_grant(view)
            yield self._env.timeout(RENEW_EVERY_S)

    def _swap(self, swap: Swap, views: list[ModelView], entering: ModelView) -> Process:
        view_of, started_s, model = {view.name: view for view in views}, self._env.now, entering.name
        is_awake_elsewhere = bool(self._fleets[model].serving)
        relost_s, self.waking = 0.0, model
        self._env.process(self._renew_grant(entering))
        if self._awake is not None:
            left, engine = self._awake
            relost_s = view_of[left].relost_s
            self._turns.record_turn(view_of[left])
            self._renew(left)
            yield engine.sleep()
            self._awake = None
            yield self._env.timeout(self._kind.swaps.sleep_s)
            self._since_s[left] = self._env.now
            self._renew(left)
        yield self._env.timeout(self._kind.swaps.wake_s)
        self._awake, self.waking = (model, self._fleets[model].add_engine(self._kind, self.notify)), None
        if not is_awake_elsewhere:
            self._record_wait(entering, started_s)
        self._since_s[model] = self._env.now
        self._renew(model)
        cost_s = self._env.now - started_s + relost_s
        self.log.swaps.append(DoneSwap(started_s, self._env.now, cost_s, model, swap.reason))
        self._debts = self._debts.after_swap(cost_s, views)

    def _record_wait(self, view: ModelView, read_s: float) -> None:
        for band, time_s in view.standing_s(read_s).items():
            self.log.waits.append(Wait(view.name, band, time_s + self._env.now - read_s))

    def _limit_claims(self, views: list[ModelView]) -> None:
        """Let first-come claim nothing that came after a request for another model."""
        if self._awake is None or self._kind.swaps.rule is not SwapRule.FIRST_COME:
            return
        model, engine = self._awake
        others_s = [min(view.oldest_s.values()) for view in views if view.name != model and view.oldest_s]
        oldest_s = min(others_s, default=math.inf)
        waiting = self._fleets[model].world.measures.waiting.values()
        earlier = (note for note in islice(waiting, self._kind.max_num_seqs) if note.arrived_s <= oldest_s)
        engine.claims.max_new = sum(1 for _ in earlier) if others_s else None
        engine.claims.wake(cause="end")

    def _renew_home(self, model: str) -> Process:
        while self.is_alive:
            self._renew(model)
            yield self._env.timeout(RENEW_EVERY_S)

    def _renew(self, model: str) -> None:
        level, ready_at_s = _level_of(self._engine_of(model)), self._ready_at_s.get(model)
        left_s = None if ready_at_s is None else max(0.0, ready_at_s - self._env.now)
        renewal = self._homes[model].renew(
            self._name, level, self._entry_s[model], ready_in_s=left_s, num_seqs=self._kind.max_num_seqs
        )
        self._do(model, renewal)

    def _engine_of(self, model: str) -> Engine | None:
        """Return the engine of a model that is awake."""
        return self._awake[1] if self._awake is not None and self._awake[0] == model else None

    def _do(self, model: str, call: Coroutine[Any, Any, T]) -> T:
        return _queue(self._fleets[model]).do(call)


class Devices:
    """The devices of a scenario: their deaths, and how long a free one left a waiting model asleep.

    Args:
        fleets: fleet of each model.
    """

    def __init__(self, env: simpy.Environment, scenario: Scenario, fleets: Mapping[str, Fleet]) -> None:
        self._env, self._fleets = env, fleets
        self._kinds = [kind for kind in scenario.engines if kind.models for _ in range(kind.number)]
        self._random = Random(f"{scenario.seed} devices")
        self.devices = [Device(env, f"device{number}", kind, fleets) for number, kind in enumerate(self._kinds)]
        self._num_deaths = 0
        # Since when each model waits although a device is free, and the longest time so far.
        self._neglected_s: dict[str, float] = {}
        self.longest_neglect_s = 0.0
        for model in {model for kind in self._kinds for model in kind.models}:
            partition = _queue(fleets[model])
            partition.listen(partition.keys.wanted, self._notify_all)
            env.process(self._watch(model))
        for deaths in scenario.deaths if self._kinds else ():
            env.process(self._let_die(deaths))

    def end(self) -> list[SwapLog]:
        """Return the logs of all devices, with the waits until now."""
        logs = [device.log for device in self.devices]
        least_s = max((kind.swaps.sleep_s + kind.swaps.wake_s for kind in self._kinds), default=0.0)
        dearest_s = max((swap.cost_s for log in logs for swap in log.swaps), default=least_s)
        for device in self.devices:
            device.end()
            device.log.dearest_s, device.log.num_deaths = dearest_s, self._num_deaths
            device.log.extra_s = dearest_s + LEASE_TTL_MS / 1000 if len(self.devices) > 1 else 0.0
        return logs

    def _notify_all(self) -> None:
        for device in self.devices:
            device.notify()

    def _let_die(self, deaths: Deaths) -> Process:
        """Let those die first that wake a model, then those with a model awake, then the cheapest homes."""
        yield self._env.timeout(deaths.at_s)
        living = [device for device in self.devices if device.is_alive]
        self._random.shuffle(living)
        living.sort(key=lambda device: (device.waking is None, device.awake is None, device.log.kind.swaps.wake_s))
        dying = living[: deaths.number or round(deaths.share * len(living))]
        for device in dying:
            self._num_deaths += 1
            loss = Loss(self._env.now, 1)
            self._fleets[device.awake or device.log.kind.models[0]].world.measures.losses.append(loss)
            device.die(loss)
        if deaths.back_after_s is not None:
            yield self._env.timeout(deaths.back_after_s)
            for device in dying:
                self.devices.append(Device(self._env, f"device{len(self.devices)}", device.log.kind, self._fleets))

    def _watch(self, model: str) -> Process:
        """Measure for how long requests wait while no device has the model awake, and the cheapest home is free."""
        measures = self._fleets[model].world.measures
        while True:
            own = [device for device in self.devices if device.is_alive and model in device.log.kind.models]
            cheapest_s = min((device.log.kind.swaps.wake_s for device in own), default=0.0)
            is_free = any(device.is_free and device.log.kind.swaps.wake_s == cheapest_s for device in own)
            is_served = any(model in (device.awake, device.waking) for device in own)
            if is_free and measures.waiting and not is_served:
                since_s = self._neglected_s.setdefault(model, self._env.now)
                self.longest_neglect_s = max(self.longest_neglect_s, self._env.now - since_s)
            else:
                self._neglected_s.pop(model, None)
            yield self._env.timeout(LOOK_EVERY_S)


def longest_neglect_s(kind: Engines, bands: Iterable[str]) -> float:
    """Return the longest time for which a free device may leave a waiting model asleep, because another has died."""
    patience_s = min(map(kind.swaps.options.patience_of, bands))
    return LEASE_TTL_MS / 1000 + REAP_INTERVAL_S + patience_s + 2 * LOOK_EVERY_S


def _level_of(engine: Engine | None) -> SleepLevel:
    return SleepLevel.HOST_MEMORY if engine is None else SleepLevel.AWAKE


def _queue(fleet: Fleet) -> Partition:
    """Return the queue of a model, which has one partition here."""
    return fleet.world.partitions[0]
