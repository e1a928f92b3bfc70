"""Devices that several models share, one awake at a time: in virtual time what a supervisor's keeper does.

A model that sleeps has no engine here: a new one starts when it wakes. The device reads demands and asks for grants by
the scripts of the queue.
"""

from __future__ import annotations

import math
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import simpy

from ...shared.broker import LEASE_TTL_MS, Demand, Homes
from ...shared.swap.rule import Debts, Reason, Stay, Swap, longest_wait_s
from ...shared.swap.views import DeviceView, Memory, ModelView, SleepLevel
from .engine import Engine
from .fleet import Fleet
from .scenario import Engines, Scenario, SwapRule
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
    """Swaps and waits of one device."""

    kind: Engines
    swaps: list[DoneSwap] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)

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
        dearest = max((swap.cost_s for swap in self.swaps), default=0.0)
        return longest_wait_s(len(self.kind.models), dearest, options, band, is_most_urgent=is_most_urgent)


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
        self._awake: tuple[str, Engine] | None = None
        self._change = env.event()
        env.process(self._run())
        for model in kind.models:
            env.process(self._renew_home(model))

    def notify(self) -> None:
        """Decide again, because a request arrived or ended."""
        if not self._change.triggered:
            self._change.succeed()

    def end(self) -> None:
        """Record the waits of models that still sleep."""
        for view in self._views():
            self._record_wait(view, self._env.now)

    def _run(self) -> Process:
        while True:
            views, self._change = self._views(), self._env.event()
            choice = self._decide(self._env.now, _ONE_MODEL, views, self._debts, self._kind.swaps.options)
            if isinstance(choice, Swap):
                if self._is_granted(next(view for view in views if view.name == choice.entering)):
                    yield from self._swap(choice, views)
                continue
            self._limit_claims(views)
            yield from self._stay(choice, views)

    def _stay(self, stay: Stay, views: list[ModelView]) -> Process:
        started_s = self._env.now
        # Requests that wait for a model with an engine elsewhere publish nothing, so demands are read again.
        until_s = min(stay.until_s, started_s + LOOK_EVERY_S)
        yield self._change | self._env.timeout(max(1e-6, until_s - started_s))
        self._debts = self._debts.after_serving(self._env.now - started_s, views, self._kind.swaps.options)

    def _views(self) -> list[ModelView]:
        return [self._view(model, self._do(model, self._homes[model].demand())) for model in self._kind.models]

    def _view(self, model: str, demand: Demand) -> ModelView:
        now_s, swaps = self._env.now, self._kind.swaps
        engine = self._engine_of(model)
        running = list(engine.running.values()) if engine else []
        if running or demand.oldest_age_s:
            self._used_s[model] = now_s
        is_free_elsewhere = engine is None and demand.num_free_seqs > 0
        return ModelView(
            name=model,
            level=_level_of(engine),
            since_s=self._since_s[model],
            oldest_s={band: now_s - age_s for band, age_s in demand.oldest_age_s.items()},
            num_running=len(running),
            deadline_s=now_s + demand.deadline_in_s,
            can_wake=now_s >= self._ask_again_s[model] and not is_free_elsewhere,
            wake_s=swaps.wake_s,
            sleep_s=swaps.sleep_s,
            relost_s=sum(one.num_context for one in running) * self._kind.speed.ms_per_prompt_token / 1000,
            used_s=self._used_s[model],
            memory=Memory(awake=1),
        )

    def _is_granted(self, view: ModelView) -> bool:
        """Ask to wake a model. If another device goes first, the model does not count for a time."""
        waited_s = max(view.standing_s(self._env.now).values())
        request = self._homes[view.name].request_grant(self._name, view.wake_s, waited_s=waited_s)
        grant = self._do(view.name, request)
        if not grant.is_granted:
            self._ask_again_s[view.name] = self._env.now + max(grant.wait_s, LOOK_EVERY_S)
        return grant.is_granted

    def _swap(self, swap: Swap, views: list[ModelView]) -> Process:
        view_of, started_s, model = {view.name: view for view in views}, self._env.now, swap.entering or ""
        relost_s = 0.0
        if self._awake is not None:
            left, engine = self._awake
            relost_s = view_of[left].relost_s
            self._awake = None
            yield engine.sleep()
            yield self._env.timeout(self._kind.swaps.sleep_s)
            self._since_s[left] = self._env.now
            self._renew(left)
        yield self._env.timeout(self._kind.swaps.wake_s)
        self._awake = model, self._fleets[model].add_engine(self._kind, self.notify)
        self._record_wait(view_of[model], started_s)
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
        while True:
            self._renew(model)
            yield self._env.timeout(RENEW_EVERY_S)

    def _renew(self, model: str) -> None:
        level = _level_of(self._engine_of(model))
        self._do(model, self._homes[model].renew(self._name, level, self._kind.swaps.wake_s))

    def _engine_of(self, model: str) -> Engine | None:
        """Return the engine of a model that is awake."""
        return self._awake[1] if self._awake is not None and self._awake[0] == model else None

    def _do(self, model: str, call: Coroutine[Any, Any, T]) -> T:
        return _queue(self._fleets[model]).do(call)


def begin_devices(env: simpy.Environment, scenario: Scenario, fleets: Mapping[str, Fleet]) -> list[Device]:
    """Start the engines that serve several models."""
    kinds = [kind for kind in scenario.engines if kind.models for _ in range(kind.number)]
    devices = [Device(env, f"device{number}", kind, fleets) for number, kind in enumerate(kinds)]

    def notify_all() -> None:
        for device in devices:
            device.notify()

    for kind in kinds:
        for model in kind.models:
            partition = _queue(fleets[model])
            partition.listen(partition.keys.wanted, notify_all)
    return devices


def _level_of(engine: Engine | None) -> SleepLevel:
    return SleepLevel.HOST_MEMORY if engine is None else SleepLevel.AWAKE


def _queue(fleet: Fleet) -> Partition:
    """Return the queue of a model, which has one partition here."""
    return fleet.world.partitions[0]
