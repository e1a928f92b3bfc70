"""The keeper of a device: decides which of its models are awake, and carries out swaps step by step.

    read demands ─▶ decide ─┬─ stay ─▶ wait for a request, a process, an operator, or the time of the next change
         ▲                  └─ swap ─▶ grant ▶ those that leave sleep ▶ their memory is free ▶ the next one wakes
         └───────────────────────────────────────────────────────────────────────────────┘

Each decision begins with the reports of processes, never with former intentions, so a swap may end at any step.
A model that failed to leave stays awake. One that failed to wake backs off, and the others go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import mean

import structlog
from redis.exceptions import RedisError

from ...shared.broker import Homes
from ...shared.errors import CacheTooSmallError, ConfigurationError, ModelTooLargeError, PenstockError
from ...shared.messages.devices import ModelPhase
from ...shared.messages.supervision import ModelAction, ModelCommand
from ...shared.process.waiting import wait_at_most
from ...shared.swap.budget import departures, fits_alone, sleep_level
from ...shared.swap.forecast import Turns, ready_in_s, time_left_s
from ...shared.swap.rule import Debts, Reason, Stay, Swap, dearest_s, decide, entry_s, longest_wait_s
from ...shared.swap.views import DeviceView, ModelView, SleepLevel
from ...shared.values.shown import format_bytes
from ..config.swap import SharingOptions
from .cards import read_cards
from .kept_model import KeptModel
from .memory import files_state, size_problem
from .plan import DevicePlan
from .swap_log import SwapLog, left_by
from .waking import Waking

# Interval of decisions while a request waits, and otherwise.
LOOK_EVERY_S, IDLE_LOOK_EVERY_S = 0.25, 1.0
# A model whose Redis does not answer for this long is passed over.
REDIS_PATIENCE_S = 2.0
GRANT_EVERY_S = 1.0
FORECAST_EVERY_S = 1.0
FILES_EVERY_S = 2.0

log = structlog.get_logger()


class DeviceKeeper:
    """Decides for the models of one device; ``keep`` until cancelled.

    Args:
        device_id: name of the device among the homes of its models.
        homes: homes of each model, by name; the reporter may replace them.

    Attributes:
        debts: time of swaps that is not repaid yet.
        log: swaps so far.
        options: options of the rule.
        started: set once the models of the start are loaded: whether any can be served.
        serves_since_s: time of that, by the event loop's clock.
    """

    def __init__(
        self,
        device_id: str,
        plan: DevicePlan,
        models: Sequence[KeptModel],
        homes: dict[str, Homes],
        sharing: SharingOptions,
    ) -> None:
        self.device_id = device_id
        self.models = {model.name: model for model in models}
        self.debts = Debts()
        self.log = SwapLog()
        self.options = sharing.swap_options
        self.started: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._load_at_start = sharing.load_at_start
        self._view = DeviceView(memory=plan.budget, host_memory=plan.host_budget)
        self._waking = Waking(self._view, plan.placement.visible_devices, self.models, self.views)
        self._homes = homes
        self._changed = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self.serves_since_s = self._clock()
        self._broken_files: dict[str, object] = {}
        self._files_due_s = 0.0
        self._turns = Turns()
        self._forecast_due_s = 0.0
        self._ready_at_s: dict[str, float] = {}
        self._swap_started_s = 0.0

    def notify(self) -> None:
        """Decide again, because a request arrived, or a process changed."""
        self._changed.set()

    def command(self, command: ModelCommand) -> None:
        """Follow an operator's command about a model."""
        model = self.models.get(command.model)
        if model is None:
            log.warning("model_command_refused", model=command.model, reason="this worker does not have the model")
            return
        is_load = command.action in (ModelAction.LOAD, ModelAction.PIN)
        if is_load and self._swap_to(model.name, self.views()) is None:
            self._refuse(model)
            return
        log.info("model_command", model=model.name, action=command.action.value)
        if command.action in (ModelAction.PIN, ModelAction.UNPIN):
            model.pin(is_pinned=command.action is ModelAction.PIN)
        if is_load:
            model.is_held, model.is_wanted = False, True
            model.repair()
        elif command.action is ModelAction.UNLOAD:
            model.is_held, model.is_wanted = True, False
        self.notify()

    def views(self) -> list[ModelView]:
        """Return the state of all models, by the last reports of their processes and of Redis."""
        now_s = self._clock()
        measured = [slowness for model in self.models.values() if (slowness := model.load_slowness)]
        for model in self.models.values():
            model.costs.slowness = mean(measured) if measured else 1.0
            model.take_over_reports(now_s)
            if model.level is SleepLevel.DISK:
                model.cache_bytes = self._waking.cache_bytes(model)
                everyone = [each.bytes for each in self.models.values()]
                model.size_problem = size_problem(self._view.memory, model.name, model.bytes, everyone)
        views = [model.rule_view(now_s) for model in self.models.values()]
        for view in views:
            self.models[view.name].entry_s = entry_s(self._view, views, view)
        return views

    async def _fitting_views(self) -> list[ModelView]:
        """End sleeping processes that would not fit awake, because sizes have changed, and return the state then."""
        views = self.views()
        sleeping = (SleepLevel.HOST_MEMORY, SleepLevel.PROCESS)
        unfit = [view.name for view in views if view.level in sleeping and not fits_alone(self._view, view, views)]
        for name in unfit:
            # Its next process gets a smaller cache.
            await self.models[name].unload()
        return self.views() if unfit else views

    def ready_in_s(self, name: str) -> float | None:
        """Return the time until a sleeping model is expected to be awake; None if that is unknown."""
        at_s = self._ready_at_s.get(name)
        if at_s is None or self.models[name].phase is not ModelPhase.WAKING:
            return None if at_s is None else max(0.0, at_s - self._clock())
        return time_left_s(at_s - self._swap_started_s, self._clock() - self._swap_started_s)

    def _forecast(self, views: Sequence[ModelView]) -> None:
        """Forecast when sleeping models wake, and those without requests if one came now."""
        now_s = self._clock()
        self._forecast_due_s = now_s + FORECAST_EVERY_S
        wakeable = [
            view if view.oldest_s else replace(view, can_wake=self.models[view.name].may_wake) for view in views
        ]
        waits_s = ready_in_s(now_s, self._view, wakeable, self.debts, self.options, self._turns)
        self._ready_at_s = {name: now_s + wait_s for name, wait_s in waits_s.items()}

    async def keep(self) -> None:
        """Load the models of the start, set ``started``, and keep the device until cancelled."""
        can_serve = await self._load_first()
        self.serves_since_s = self._clock()
        self._log_waits()
        self.started.set_result(can_serve)
        while True:
            await self.decide_once()

    async def _load_first(self) -> bool:
        """Load pinned models, and others as ``load_at_start`` says. Returns whether the device can serve any model."""
        models = sorted(self.models.values(), key=lambda model: not model.is_pinned)
        for model in models:
            is_first = self._load_at_start == "first" and not any(each.costs.wakes for each in self.models.values())
            if model.broken_reason or not (model.is_pinned or is_first or self._load_at_start == "all"):
                continue
            views = self.views()
            swap = self._swap_to(model.name, views)
            if swap is not None:
                await self._carry_out(swap, views)
        if self._load_at_start == "none":
            return not all(model.broken_reason for model in models)
        return any(model.costs.wakes for model in models)

    async def decide_once(self) -> None:
        """Read, decide, and swap or wait once."""
        self._changed.clear()
        await self._read_demands()
        await self._check_files()
        views, now_s = await self._fitting_views(), self._clock()
        choice = self._operators_choice(views) or decide(now_s, self._view, views, self.debts, self.options)
        if isinstance(choice, Swap) or now_s >= self._forecast_due_s:
            self._forecast(views)
        if isinstance(choice, Swap):
            await self._carry_out(choice, views)
        else:
            await self._stay(choice, views)

    def _log_waits(self) -> None:
        """Log the longest wait of a request for its model, by the costs that are known now."""
        num_models, dearest = len(self.models), dearest_s(self.views())
        is_kept = 2 * num_models * dearest <= self.options.max_wait_of("standard")
        log.log(
            logging.INFO if is_kept else logging.WARNING,
            "longest_wait",
            device=self.device_id,
            dearest_swap_s=round(dearest, 2),
            longest_wait_s=round(longest_wait_s(num_models, dearest, self.options, "standard"), 1),
        )

    async def _stay(self, stay: Stay, views: Sequence[ModelView]) -> None:
        started_s = self._clock()
        is_someone_waiting = any(view.oldest_s and not view.is_awake for view in views)
        wait_s = min(stay.until_s - started_s, LOOK_EVERY_S if is_someone_waiting else IDLE_LOOK_EVERY_S)
        await wait_at_most(max(0.001, wait_s), self._changed.wait())
        self.debts = self.debts.after_serving(self._clock() - started_s, views, self.options)

    async def _read_demands(self) -> None:
        await asyncio.gather(*map(self._read_demand, self.models.values()))

    async def _read_demand(self, model: KeptModel) -> None:
        try:
            async with asyncio.timeout(REDIS_PATIENCE_S):
                model.demand = await self._homes[model.name].demand()
        except (TimeoutError, PenstockError, RedisError) as error:
            if model.is_reachable:
                log.warning("demand_unknown", model=model.name, error=str(error) or "Redis does not answer")
            model.is_reachable = False
        else:
            model.is_reachable = True

    async def _check_files(self) -> None:
        """Try broken models again whose files have changed."""
        if self._clock() < self._files_due_s:
            return
        self._files_due_s = self._clock() + FILES_EVERY_S
        for model in self.models.values():
            if not model.broken_reason or model.planned.path is None:
                self._broken_files.pop(model.name, None)
                continue
            state = await asyncio.to_thread(files_state, model.planned.path)
            if self._broken_files.setdefault(model.name, state) == state:
                continue
            self._broken_files[model.name] = state
            with suppress(ConfigurationError):
                (reply,) = await asyncio.to_thread(read_cards, [model.planned.engine])
                # Files that are missing now may be there at the next look.
                if not reply.problem:
                    model.renew(reply.weight_bytes)
                    del self._broken_files[model.name]

    def _operators_choice(self, views: Sequence[ModelView]) -> Swap | None:
        """Return the swap that operators ask for; None if they ask for none."""
        for view in views:
            model = self.models[view.name]
            if view.is_awake and (model.is_held or self._keeps_too_much(model, views)):
                return Swap(Reason.OPERATOR, asleep=(view.name,))
            # A pinned model that died wakes without a request.
            is_due = model.is_wanted or (model.is_pinned and model.may_wake and not model.is_backing_off(self._clock()))
            if view.is_awake or model.is_held or not is_due or self._clock() < model.ask_again_s:
                continue
            swap = self._swap_to(view.name, views)
            if swap is not None:
                return swap
            if model.is_wanted:
                self._refuse(model)
            model.is_wanted = False
        return None

    def _keeps_too_much(self, model: KeptModel, views: Sequence[ModelView]) -> bool:
        """Return whether a pinned model has a cache from before, beside which another model does not fit.

        It leaves and is loaded again with a smaller one.
        """
        if not model.is_pinned or model.cache_bytes <= self._waking.cache_bytes(model):
            return False
        return any(not fits_alone(self._view, view, views) for view in views if not view.is_pinned)

    def _refuse(self, model: KeptModel) -> None:
        reason = model.size_problem or "it does not fit beside pinned models"
        model.num_refusals, model.refusal = model.num_refusals + 1, reason
        log.warning("model_command_refused", model=model.name, reason=reason)

    def _swap_to(self, name: str, views: Sequence[ModelView]) -> Swap | None:
        """Return the swap to a model, for which others leave even with work.

        None if it does not fit beside pinned models.
        """
        leaving = departures(self._view, views, next(view for view in views if view.name == name))
        return None if leaving is None else Swap(Reason.OPERATOR, leaving.asleep, leaving.ended, name)

    async def _carry_out(self, swap: Swap, views: Sequence[ModelView]) -> None:
        view_of = {view.name: view for view in views}
        entering = self.models[swap.entering] if swap.entering is not None else None
        if entering is not None and not await self._is_granted(entering, view_of[entering.name], swap.reason):
            return
        if entering is None:
            await self._swap(swap, views, None)
            return
        renewing = asyncio.create_task(self._renew_grant(entering))
        try:
            is_done = await self._swap(swap, views, entering)
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
        if not is_done:
            await self._return_grant(entering)

    async def _swap(self, swap: Swap, views: Sequence[ModelView], entering: KeptModel | None) -> bool:
        """Carry out a swap, and record it. Returns False if a model could not leave or wake."""
        started_s, view_of = self._clock(), {view.name: view for view in views}
        relost_s = sum(view_of[name].relost_s for name in swap.asleep)
        num_handed_back = sum(view_of[name].num_running for name in swap.asleep)
        for name in swap.asleep:
            self._turns.record_turn(view_of[name])
        if entering is not None:
            sleep_s = sum(view_of[name].sleep_s for name in swap.asleep)
            self._swap_started_s = started_s
            self._ready_at_s[entering.name] = started_s + sleep_s + view_of[entering.name].wake_s
        if not await self._leave(swap, entering):
            return False
        is_done = entering is None or await self._wake(entering)
        took_s = self._clock() - started_s
        # Operators' swaps and idle models displace no request that the rule would have to protect.
        if entering is not None and swap.reason is not Reason.OPERATOR:
            self.debts = self.debts.after_swap(took_s + relost_s, views)
        # Models have left, although the one that should enter failed.
        swap = swap if is_done else replace(swap, entering=None)
        if swap.entering or swap.asleep or swap.ended:
            self.log.add_swap(swap, took_s, num_handed_back, self._clock())
            log.info(
                "swapped",
                left=left_by(swap),
                entered=swap.entering or "",
                reason=swap.reason.value,
                took_s=round(took_s, 3),
                num_handed_back=num_handed_back,
                debt_s=round(self.debts.soft_s, 2),
            )
        return is_done

    async def _is_granted(self, model: KeptModel, view: ModelView, reason: Reason) -> bool:
        """Request the right to wake a model. If another device goes first, the model does not count for a time."""
        if reason is Reason.OPERATOR:
            return True
        now_s = self._clock()
        waited_s = now_s - model.needed_since_s if model.needed_since_s is not None else 0.0
        try:
            async with asyncio.timeout(REDIS_PATIENCE_S):
                grant = await self._homes[model.name].request_grant(
                    self.device_id,
                    model.entry_s,
                    waited_s=waited_s,
                    patience_s=min(map(model.options.patience_of, view.oldest_s), default=0.0),
                    num_engines=model.num_wanted,
                )
        except (TimeoutError, PenstockError, RedisError) as error:
            log.warning("demand_unknown", model=model.name, error=str(error) or "Redis does not answer")
            model.ask_again_s = now_s + 1.0
            return False
        if not grant.is_granted:
            model.ask_again_s = now_s + max(grant.wait_s, LOOK_EVERY_S)
        return grant.is_granted

    async def _leave(self, swap: Swap, entering: KeptModel | None) -> bool:
        """Put models to sleep, and end processes. Returns False if a model stays awake."""
        cause = f"its model left the device ({swap.reason})" if entering is None else f"swapped for {entering.name}"
        for name in swap.asleep:
            model = self.models[name]
            try:
                await model.put_to_sleep(SleepLevel.DISK if name in swap.ended else self._level_for(model), cause)
            except PenstockError as error:
                log.error("sleep_failed", model=name, cause=str(error))
                if entering is not None:
                    entering.ask_again_s = self._clock() + 1.0
                model.is_held = False
                return False
        for name in set(swap.ended) - set(swap.asleep):
            await self.models[name].unload()
        return True

    def _level_for(self, model: KeptModel) -> SleepLevel:
        if model.sleeps_on_disk or model.cache_bytes > self._waking.cache_bytes(model):
            # If its weights turned out larger than its files, the next load makes a smaller cache.
            return SleepLevel.DISK
        if model.planned.sleep_level is not None:
            return model.planned.sleep_level
        views = self.views()
        return sleep_level(self._view, views, next(view for view in views if view.name == model.name))

    async def _wake(self, model: KeptModel) -> bool:
        """Wake a model. Returns False if it does not wake, or does not fit."""
        try:
            await self._waking.wake(model)
        except CacheTooSmallError as error:
            memory = format_bytes(self._view.memory)
            problem = f"model {model.name} does not fit: {error}; device_memory is {memory}"
            model.record_failure(ModelTooLargeError(problem), self._clock())
            return False
        except PenstockError as error:
            model.record_failure(error, self._clock())
            return False
        return True

    async def _renew_grant(self, model: KeptModel) -> None:
        while True:
            await asyncio.sleep(GRANT_EVERY_S)
            with suppress(PenstockError, RedisError):
                await self._homes[model.name].request_grant(self.device_id, 0.0)

    async def _return_grant(self, model: KeptModel) -> None:
        # It ends by itself after its lease.
        with suppress(TimeoutError, PenstockError, RedisError):
            async with asyncio.timeout(REDIS_PATIENCE_S):
                await self._homes[model.name].return_grant(self.device_id)
