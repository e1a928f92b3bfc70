"""A device that serves one request after the other, of models that share it by the rule, in simulated time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.shared.swap.rule import Debts, Reason, Stay, Swap, decide
from penstock.shared.swap.views import DeviceView, Memory, ModelView, SleepLevel, SwapOptions

BAND = "interactive"
BACKOFF_S = 1.0


@dataclass
class Model:
    """A model and its load: ``arrivals`` of requests with their seconds of work, without end if ``is_hot``."""

    name: str
    wake_s: float
    sleep_s: float
    relost_s: float
    arrivals: list[tuple[float, float]]
    is_hot: bool = False
    band: str = BAND
    queue: list[list[float]] = field(default_factory=list)
    since_s: float = 0.0
    used_s: float = 0.0
    blocked_until_s: float = 0.0
    # Since when it stands with work, with the number of deaths until then; None while it does not.
    stands: tuple[float, int] | None = None

    @property
    def dearest_s(self) -> float:
        return self.wake_s + self.sleep_s + self.relost_s

    def arrive(self, now_s: float) -> None:
        while self.arrivals and self.arrivals[0][0] <= now_s:
            self.queue.append(list(self.arrivals.pop(0)))
        if self.is_hot and len(self.queue) < 2:
            self.queue += [[now_s, 0.5], [now_s, 0.5]]

    def view(self, now_s: float, is_awake: bool) -> ModelView:
        waiting = self.queue[1:] if is_awake else self.queue
        return ModelView(
            name=self.name,
            level=SleepLevel.AWAKE if is_awake else SleepLevel.HOST_MEMORY,
            since_s=self.since_s,
            oldest_s={self.band: min(at_s for at_s, _ in waiting)} if waiting else {},
            num_running=int(is_awake and bool(self.queue)),
            can_wake=now_s >= self.blocked_until_s,
            wake_s=self.wake_s,
            sleep_s=self.sleep_s,
            relost_s=self.relost_s if is_awake and self.queue else 0.0,
            used_s=self.used_s,
            memory=Memory(awake=1),
        )


@dataclass(frozen=True)
class DoneSwap:
    """A swap that was carried out, and whether it left a model with work."""

    start_s: float
    end_s: float
    reason: Reason
    is_from_working: bool
    debts: Debts
    cost_s: float


class SharedDevice:
    """A device with room for one model. At each of ``deaths_s`` the awake model dies, or the waking one."""

    def __init__(self, models: Sequence[Model], options: SwapOptions, deaths_s: Sequence[float] = ()) -> None:
        self.models, self.options = models, options
        self.now_s = 0.0
        self.swaps: list[DoneSwap] = []
        # Of each wait: model, its duration, and the number of deaths meanwhile.
        self.waits: list[tuple[Model, float, int]] = []
        # Intervals in which the awake model, or the one that wakes, had no work.
        self.idle: list[tuple[float, float]] = []
        self._awake: Model | None = None
        self._debts = Debts()
        self._deaths = sorted(deaths_s)
        self._num_deaths = 0

    def run(self, until_s: float) -> None:
        while self.now_s < until_s:
            self._note_standing()
            views = [model.view(self.now_s, model is self._awake) for model in self.models]
            choice = decide(self.now_s, DeviceView(memory=1), views, self._debts, self.options)
            if isinstance(choice, Swap):
                self._swap(choice, views)
            else:
                self._serve(choice, until_s, views)
        for model in self.models:
            if model.stands is not None:
                self.waits.append((model, self.now_s - model.stands[0], self._num_deaths - model.stands[1]))

    def _note_standing(self) -> None:
        for model in self.models:
            model.arrive(self.now_s)
            if model is not self._awake and model.queue and model.stands is None:
                model.stands = (max(model.queue[0][0], model.since_s), self._num_deaths)

    def _swap(self, swap: Swap, views: Sequence[ModelView]) -> None:
        entering = next(model for model in self.models if model.name == swap.entering)
        left, started_s, cost_s = self._awake, self.now_s, entering.wake_s
        is_from_working = left is not None and bool(left.queue)
        if left is not None:
            assert swap.asleep == (left.name,)
            cost_s += left.sleep_s
            self.now_s += left.sleep_s
            left.since_s = self.now_s
        self.now_s += entering.wake_s
        relost_s = left.relost_s if left is not None and is_from_working else 0.0
        if left is not None and relost_s:
            left.queue[0][1] += relost_s
        self.swaps.append(DoneSwap(started_s, self.now_s, swap.reason, is_from_working, self._debts, cost_s + relost_s))
        self._debts = self._debts.after_swap(cost_s + relost_s, views)
        self._awake = entering
        if not self._die_by_now():
            assert entering.stands is not None
            since_s, num_deaths = entering.stands
            self.waits.append((entering, self.now_s - since_s, self._num_deaths - num_deaths))
            entering.stands, entering.since_s = None, self.now_s

    def _die_by_now(self) -> bool:
        """Let the awake model die if a death is due. Its requests return, and it wakes again after a time."""
        if not (self._deaths and self._deaths[0] <= self.now_s):
            return False
        while self._deaths and self._deaths[0] <= self.now_s:
            self._deaths.pop(0)
            self._num_deaths += 1
        if self._awake is None:
            return False
        self._awake.blocked_until_s = self.now_s + BACKOFF_S
        if self._awake.stands is None:
            self._awake.since_s = self.now_s
        self._awake = None
        return True

    def _serve(self, stay: Stay, until_s: float, views: Sequence[ModelView]) -> None:
        end_s = min(stay.until_s, until_s, *(model.arrivals[0][0] for model in self.models if model.arrivals), math.inf)
        assert stay.until_s > self.now_s
        for model in self.models:
            if model.blocked_until_s > self.now_s:
                end_s = min(end_s, model.blocked_until_s)
        if self._deaths:
            end_s = min(end_s, max(self.now_s, self._deaths[0]))
        serving = self._awake if self._awake is not None and self._awake.queue else None
        if serving is not None:
            end_s = min(end_s, self.now_s + serving.queue[0][1])
            serving.queue[0][1] -= end_s - self.now_s
            serving.used_s = end_s
            if serving.queue[0][1] <= 1e-9:
                serving.queue.pop(0)
        else:
            self.idle.append((self.now_s, end_s))
        self._debts = self._debts.after_serving(end_s - self.now_s, views, self.options)
        self.now_s = end_s
        self._die_by_now()
