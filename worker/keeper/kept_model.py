"""A model on a device that several models share: its level as its process reports it, its costs and its failures."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import structlog

from ...shared.broker import Demand
from ...shared.control.engine import Sleep
from ...shared.deployment.records import EngineSetup
from ...shared.errors import EngineDeadError, ModelBrokenError, ModelTooLargeError, PenstockError
from ...shared.messages.devices import DeviceModel, ModelPhase
from ...shared.process.children import restart_delay_s
from ...shared.swap.rule import lateness
from ...shared.swap.views import Memory, ModelView, SleepLevel, SwapOptions
from ..supervisor.restart import Phase
from .costs import Costs, running_tokens
from .engine import ModelStartError, SharedEngine
from .memory import ModelBytes, own_bytes, reserved_bytes
from .plan import PlannedModel

# Failed wakes of its own after which a model is broken. Failures from outside, such as a killed process, only delay the
# next wake: they say nothing of the model, and its requests wait.
MAX_OWN_FAILURES = 3
log = structlog.get_logger()


@dataclass
class _Failures:
    """Failed wakes of a model.

    Args:
        in_a_row: since the last success; they set the delay of the next wake.
        num_own: those of them whose cause is the model, of which ``MAX_OWN_FAILURES`` make it broken.
        num_asleep: own ones of a model that slept since the last such wake that succeeded. After ``MAX_OWN_FAILURES``
            it sleeps on disk, since its loads succeed.
        counts: all of them, by cause.
        reason: sentence about the last one; empty after a success.
        is_too_large: whether the model did not fit.
        retry_at_s: time before which the keeper does not try again.
    """

    in_a_row: int = 0
    num_own: int = 0
    num_asleep: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    reason: str = ""
    is_too_large: bool = False
    retry_at_s: float = 0.0


class KeptModel:
    """A model of a device. Times are seconds of the event loop's clock.

    Args:
        device_id: name of the device among the homes of the model.

    Attributes:
        options: options of the rule, with its own patience and least time awake.
        bytes: its memory: estimated until it was loaded, then measured.
        size_problem: why it fits neither now nor later; empty if it does.
        demand: its last read demand.
        is_reachable: whether that is current.
        is_held: whether an operator put it to sleep, so that only an operator wakes it.
        is_wanted: whether an operator asks to wake it. It then stays awake for a time.
        num_refusals, refusal: number of refused commands, and the reason of the last one.
        ask_again_s: time before which no grant is requested again.
        entry_s: time to wake it, and to put to sleep the models that must leave for it.
        num_wanted: engines that should be awake on all devices.
        needed_since_s: since when it needs one more than are awake or wake elsewhere; None if it does not.
        phase: ``WAKING`` or ``FALLING_ASLEEP`` during a swap; None otherwise.
    """

    def __init__(self, planned: PlannedModel, engine: SharedEngine, device_id: str) -> None:
        self.name = planned.name
        self.engine = engine
        self.planned = planned
        self.bytes: ModelBytes = planned.bytes
        self.size_problem = ""
        self.costs = Costs()
        self.demand = Demand()
        self.is_reachable = True
        self.is_held = False
        self.is_wanted = False
        self.ask_again_s = 0.0
        self.phase: ModelPhase | None = None
        self.num_recomputed_tokens = 0
        self.num_refusals, self.refusal = 0, ""
        self.cache_bytes = 0
        self.entry_s = 0.0
        self.num_wanted = 1
        self.needed_since_s: float | None = None
        self._device_id = device_id
        self.options = planned.swap_options
        self._elsewhere_s = 0.0
        self._failures = _Failures(
            reason=planned.problem,
            is_too_large=planned.is_too_large,
            num_own=MAX_OWN_FAILURES if planned.problem else 0,
        )
        self._since_s = 0.0
        self._used_s = asyncio.get_running_loop().time()
        self._num_wishes = 0
        self._stays_until_s = 0.0
        self._was_awake = False
        self._is_process_held = False

    @property
    def level(self) -> SleepLevel:
        """Depth of its sleep, by the last report of its process."""
        sleep_level = self.engine.sleep_level
        return SleepLevel.DISK if sleep_level is None else SleepLevel(sleep_level)

    @property
    def is_pinned(self) -> bool:
        """Whether it never leaves the device."""
        return self.bytes.is_pinned

    def pin(self, *, is_pinned: bool) -> None:
        self.bytes = msgspec.structs.replace(self.bytes, is_pinned=is_pinned)

    @property
    def broken_reason(self) -> str:
        """Why the keeper does not wake it any more; empty if it does."""
        if self.engine.policy.phase is Phase.GIVEN_UP:
            return self.engine.describe_death()
        failures = self._failures
        return failures.reason if failures.num_own >= MAX_OWN_FAILURES else self.size_problem

    @property
    def broken_error(self) -> ModelBrokenError | None:
        """Error of its requests while the keeper does not wake it any more."""
        if not self.broken_reason:
            return None
        is_too_large = self._failures.is_too_large or self.broken_reason == self.size_problem
        return (ModelTooLargeError if is_too_large else ModelBrokenError)(self.broken_reason)

    @property
    def load_slowness(self) -> float:
        """Factor by which its loads take longer than estimated; 0 before the first."""
        return self.costs.load_slowness(self.bytes.weights)

    @property
    def may_wake(self) -> bool:
        """Whether a request would wake it, sooner or later."""
        return self.is_reachable and not (self.demand.is_paused or self.is_held or self.broken_reason)

    @property
    def failure_reason(self) -> str:
        """Reason of the last failed wake; empty after a success."""
        return self._failures.reason

    def take_over_reports(self, now_s: float) -> None:
        """Take over the reports of the process since the last call."""
        is_awake = self.level is SleepLevel.AWAKE
        if is_awake != self._was_awake:
            self._was_awake, self._since_s = is_awake, now_s
        if not is_awake or now_s >= self._stays_until_s:
            self._stays_until_s = 0.0
        if is_awake and self.is_wanted:
            self.is_wanted = False
            self._used_s, self._stays_until_s = now_s, now_s + self.options.stay_s
        process = self.engine.process
        if process.num_wishes > self._num_wishes:
            self.is_wanted = True
        self._num_wishes = process.num_wishes
        if process.alive and process.is_held != self._is_process_held:
            self.is_held = self._is_process_held = process.is_held
        beat = self.engine.heartbeat()
        if beat.stats is not None:
            self.costs.record_stats(beat.stats)
        if self.level is not SleepLevel.DISK and beat.setup is not None and beat.setup.weight_bytes:
            # A length that was lowered to a small cache is no reason for a smaller one.
            least = max(self.bytes.least_cache, _bytes_of_a_request(beat.setup))
            self.bytes = msgspec.structs.replace(self.bytes, weights=beat.setup.weight_bytes, least_cache=least)
            self.cache_bytes = beat.setup.kv_cache_bytes

    def rule_view(self, now_s: float) -> ModelView:
        """Return its state for the rule."""
        demand, level, beat = self.demand, self.level, self.engine.heartbeat()
        num_running = self._num_running(beat.num_running_reqs + beat.num_waiting_reqs)
        if num_running or demand.oldest_age_s:
            self._used_s = now_s
        is_elsewhere = demand.num_engines > (level is SleepLevel.AWAKE)
        self._observe_elsewhere(now_s, is_awake=level is SleepLevel.AWAKE, is_elsewhere=is_elsewhere)
        weights = self.bytes.weights
        return ModelView(
            name=self.name,
            level=level,
            since_s=self._since_s,
            oldest_s={band: now_s - age_s for band, age_s in demand.oldest_age_s.items()},
            num_running=num_running,
            deadline_s=now_s + demand.deadline_in_s,
            service_s=_mean(beat.stats.latency_s.sum, beat.stats.latency_s.count) if beat.stats else 0.0,
            can_wake=self.may_wake
            and self.needed_since_s is not None
            and now_s >= self.ask_again_s
            and not self.is_backing_off(now_s),
            is_pinned=self.is_pinned,
            is_elsewhere=is_elsewhere,
            wake_s=self.costs.wake_s(level, weights),
            sleep_s=self.costs.sleep_s,
            relost_s=self.costs.relost_s(running_tokens(beat)) if num_running else 0.0,
            used_s=self._used_s,
            memory=Memory(
                awake=weights + self.cache_bytes + self.bytes.process, asleep=self.bytes.process, weights=weights
            ),
            wake_s_of=self.costs.wakes_s,
            stays_until_s=self._stays_until_s,
            own_options=self.options,
        )

    def _observe_elsewhere(self, now_s: float, *, is_awake: bool, is_elsewhere: bool) -> None:
        """Take over from the demand whether other devices serve the model, and whether it needs one engine more."""
        if is_elsewhere:
            self._elsewhere_s = now_s
        elif not is_awake:
            # Its turn elsewhere counts like one here.
            self._since_s = max(self._since_s, self._elsewhere_s)
        demand = self.demand
        self.num_wanted = demand.num_engines_wanted(self.options)
        is_needed = bool(demand.oldest_age_s) and self.num_wanted > demand.num_engines_without(self._device_id)
        if not is_needed:
            self.needed_since_s = None
        elif self.needed_since_s is None:
            self.needed_since_s = now_s

    def is_backing_off(self, now_s: float) -> bool:
        """Return whether a failure or a death holds it back for a time."""
        policy = self.engine.policy
        return now_s < self._failures.retry_at_s or (policy.phase is Phase.DOWN and policy.restart_in_s > 0)

    def _num_running(self, num_reported: int) -> int:
        """Return the requests that run here. Redis knows them at once, the engine's heartbeat a second later."""
        if self.level is not SleepLevel.AWAKE:
            return 0
        return self.demand.num_running if self.demand.num_engines <= 1 else num_reported

    async def put_to_sleep(self, level: SleepLevel, cause: str) -> None:
        """Put it to sleep; on disk its process ends.

        Args:
            cause: why, for the events of its requests.

        Raises:
            PenstockError: it stays awake.
        """
        loop = asyncio.get_running_loop()
        started_s, self.phase = loop.time(), ModelPhase.FALLING_ASLEEP
        self.num_recomputed_tokens += running_tokens(self.engine.heartbeat())
        try:
            # Before its process ends, too: that hands requests back at once.
            await self.engine.process.order(Sleep(level=min(int(level), int(SleepLevel.PROCESS)), cause=cause))
            if level is SleepLevel.DISK:
                await self.unload()
        except EngineDeadError:
            # It is dead, and gives its memory back when its last process has ended.
            await self.engine.process.gone()
            return
        finally:
            self.phase = None
        self.costs.record_sleep(level, loop.time() - started_s)
        await self._measure_process()

    async def unload(self) -> None:
        """End its process."""
        await self.engine.end_process()
        log.info("model_unloaded", model=self.name)

    async def wake_or_load(self, cache_bytes: int) -> float:
        """Wake it, or load it in a new process, and return the time that it took.

        Args:
            cache_bytes: bytes of the KV cache of a new process.

        Raises:
            PenstockError: it is not awake.
        """
        loop, level = asyncio.get_running_loop(), self.level
        started_s, self.phase = loop.time(), ModelPhase.WAKING
        try:
            if level is SleepLevel.DISK:
                self.engine.revive()
                await self.engine.load(cache_bytes)
                self.cache_bytes = self.cache_bytes or cache_bytes
            else:
                await self._wake_up()
        finally:
            self.phase = None
        took_s = loop.time() - started_s
        # Otherwise it would sleep again at once if its requests have ended meanwhile.
        self._used_s = loop.time()
        self.costs.record_wake(level, took_s)
        self.repair()
        self._failures.reason = ""
        return took_s

    async def _wake_up(self) -> None:
        try:
            await self.engine.wake_up()
        except PenstockError as error:
            self._failures.num_asleep += not _is_external(error)
            raise
        self._failures.num_asleep = 0

    @property
    def sleeps_on_disk(self) -> bool:
        """Whether its sleeping process fails to wake each time."""
        return self._failures.num_asleep >= MAX_OWN_FAILURES

    def record_failure(self, error: PenstockError, now_s: float) -> None:
        """Record a failed wake, and log it."""
        self.is_wanted = False
        failures = self._failures
        is_external = _is_external(error)
        failures.in_a_row += 1
        failures.num_own += not is_external
        failures.counts[error.code] += 1
        failures.reason = str(error)
        failures.is_too_large = isinstance(error, ModelTooLargeError)
        if failures.is_too_large:
            # Another try would have no more memory.
            failures.num_own = MAX_OWN_FAILURES
        delay_s = restart_delay_s(failures.in_a_row + 1)
        failures.retry_at_s = now_s + delay_s
        log.error(
            "wake_failed",
            model=self.name,
            cause=failures.reason,
            is_external=is_external,
            num_failures=failures.in_a_row,
            retry_in_s=round(delay_s, 1),
            trace=error.trace if isinstance(error, ModelStartError) else "",
        )
        if self.broken_reason:
            log.error("model_broken", model=self.name, cause=failures.reason)

    def renew(self, weight_bytes: int) -> None:
        """Take over that its files are others now."""
        self.bytes = msgspec.structs.replace(self.bytes, weights=weight_bytes, least_cache=0)
        self._failures.num_asleep = 0
        self.repair()

    def repair(self) -> None:
        """Forget failures, because the model woke, its files changed, or an operator asks for it."""
        self._failures.in_a_row, self._failures.num_own, self._failures.retry_at_s = 0, 0, 0.0
        self.engine.revive()

    async def _measure_process(self) -> None:
        """Measure the memory of its sleeping process. A GPU's context is not known to the supervisor."""
        beat = self.engine.heartbeat()
        if self.level not in (SleepLevel.HOST_MEMORY, SleepLevel.PROCESS):
            return
        if self.planned.engine.device == "cpu":
            process = await asyncio.to_thread(own_bytes, [beat.worker_pid, beat.core_pid])
            weights = self.bytes.weights if self.level is SleepLevel.HOST_MEMORY else 0
            reserved = reserved_bytes(self.bytes.process, process - weights)
            self.bytes = msgspec.structs.replace(self.bytes, process=reserved)

    def device_model(self, view: ModelView, now_s: float, options: SwapOptions) -> DeviceModel:
        """Return its part of the device's record."""
        standing_s = max(view.standing_s(now_s).values(), default=0.0)
        phase = self.phase or _PHASES[view.level]
        if self.broken_reason and view.level is SleepLevel.DISK and self.phase is None:
            phase = ModelPhase.BROKEN
        retry_in_s = self._failures.retry_at_s - now_s
        return DeviceModel(
            name=self.name,
            phase=phase,
            level=view.level,
            engine_id=self.engine.engine_id,
            awake_bytes=view.memory.awake,
            asleep_bytes=view.memory.asleep,
            weight_bytes=view.memory.weights,
            lateness=0.0 if view.is_awake else round(lateness(view, now_s, options), 3),
            standing_s=round(standing_s, 3),
            wake_s=round(view.wake_s, 3),
            is_pinned=self.is_pinned,
            is_kept_asleep=self.is_held,
            error=self.broken_reason or self._failures.reason,
            retry_at=time.time() + retry_in_s if retry_in_s > 0 else 0.0,
            wake_failures=dict(self._failures.counts),
            num_recomputed_tokens=self.num_recomputed_tokens,
            wakes=self.costs.wakes,
            sleeps=self.costs.sleeps,
            num_refusals=self.num_refusals,
            refusal=self.refusal,
        )


_PHASES = {
    SleepLevel.AWAKE: ModelPhase.AWAKE,
    SleepLevel.HOST_MEMORY: ModelPhase.ASLEEP,
    SleepLevel.PROCESS: ModelPhase.ASLEEP,
    SleepLevel.DISK: ModelPhase.ON_DISK,
}


def _bytes_of_a_request(setup: EngineSetup) -> int:
    """Return the bytes of the cache that a request of maximum length takes; 0 without a cache."""
    if not (setup.kv_cache_size_tokens and setup.block_size):
        return 0
    num_tokens = -(-setup.max_model_len // setup.block_size) * setup.block_size
    return -(-setup.kv_cache_bytes * num_tokens // setup.kv_cache_size_tokens)


def _is_external(error: PenstockError) -> bool:
    return isinstance(error, ModelStartError) and error.is_external


def _mean(total: float, count: int) -> float:
    return total / count if count else 0.0
