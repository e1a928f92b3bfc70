"""The control calls of Penstock's engine core: a function per type of call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from ....shared.control.calls import Utility, UtilityAnswer
from ....shared.control.engine import (
    ADAPTERS,
    KV_CACHE,
    MULTIMODAL,
    WEIGHTS,
    CheckInvariants,
    CollectiveRpc,
    DummyBatchDone,
    ExecuteDummyBatch,
    InputCacheReset,
    Invariants,
    IsSleeping,
    PrefixCacheReset,
    ProfileSaved,
    ProfileStarted,
    ResetInputCache,
    ResetPrefixCache,
    RpcResult,
    Sleep,
    SleepState,
    StartProfile,
    StopProfile,
    WakeUp,
)
from ....shared.control.model import (
    ReloadWeights,
    SaveShardedState,
    ShardedStateSaved,
    WeightsReloaded,
)
from ....shared.errors import EngineStateError
from ....shared.messages.core import UtilityCall, UtilityOutput
from ...core.answers import CallAnswers
from ...processes.progress import ProgressWriter
from ..adapters.calls import adapter_calls
from ..adapters.library import AdapterLibrary
from ..core.engine_core import EngineCore
from ..rpc import RpcEngine, RpcMethods
from .reload import WeightsReload
from .sleep import EngineSleep
from .traces import StepProfiler

_MAY_TAKE_LONG = frozenset(
    {
        ResetPrefixCache,
        Sleep,
        WakeUp,
        StartProfile,
        StopProfile,
        SaveShardedState,
        ExecuteDummyBatch,
        ReloadWeights,
    }
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ControlledParts:
    """The parts of the engine that calls act on, besides its core. ``composition`` builds them."""

    sleep: EngineSleep
    profiler: StepProfiler
    rpc_methods: RpcMethods
    rpc_engine: RpcEngine
    run_in_ranks: Callable[[CollectiveRpc, Callable[[], Any], bool], Any]
    save_sharded_state: Callable[[SaveShardedState], ShardedStateSaved]
    execute_dummy_batch: Callable[[], None]
    reload: WeightsReload
    adapters: AdapterLibrary | None = None


class EngineControl:
    """Answers the control calls of the core."""

    def __init__(self, core: EngineCore, parts: ControlledParts, progress: ProgressWriter) -> None:
        self._core = core
        self._parts = parts
        functions: dict[type, Callable[[Any], UtilityAnswer | None]] = {
            CheckInvariants: self._check_invariants,
            ResetPrefixCache: self._reset_prefix_cache,
            Sleep: self._sleep,
            WakeUp: self._wake_up,
            IsSleeping: self._is_sleeping,
            StartProfile: self._start_profile,
            StopProfile: self._stop_profile,
            SaveShardedState: self._save_sharded_state,
            CollectiveRpc: self._collective_rpc,
            ExecuteDummyBatch: self._execute_dummy_batch,
            ResetInputCache: self._reset_input_cache,
            ReloadWeights: self._reload_weights,
            **adapter_calls(parts.adapters),
        }
        self._answers = CallAnswers(functions, progress, self._takes_long)

    @property
    def weights_version(self) -> str:
        """The version of the loaded weights."""
        return self._parts.reload.source.version

    def answer(self, message: UtilityCall) -> UtilityOutput | None:
        """See ``Control``."""
        return self._answers.answer(message)

    def _takes_long(self, call: Utility) -> bool:
        if isinstance(call, CollectiveRpc):
            return self._parts.rpc_methods.takes_long(call.method)
        return type(call) in _MAY_TAKE_LONG

    def _check_invariants(self, _: CheckInvariants) -> Invariants:
        self._core.check_invariants()
        scheduler = self._core.scheduler
        stats, pool = scheduler.stats(), scheduler.block_pool
        return Invariants(pool.num_free, pool.num_blocks, stats.num_running_reqs, stats.num_waiting_reqs)

    def _reset_prefix_cache(self, _: ResetPrefixCache) -> PrefixCacheReset:
        return PrefixCacheReset(self._core.reset_prefix_cache())

    def _reset_input_cache(self, call: ResetInputCache) -> InputCacheReset:
        images = self._core.images
        return InputCacheReset(images.forget_processed() if call.cache == MULTIMODAL else images.forget_encoded())

    def _sleep(self, call: Sleep) -> SleepState:
        core = self._core
        if core.has_work or not core.forget_blocks():
            raise EngineStateError(f"the engine cannot sleep while it holds requests ({core.num_unfinished_requests})")
        # Drop images, because a sleeping engine holds no memory for them and may wake up with other weights.
        core.images.forget_processed()
        core.images.forget_encoded()
        self._parts.sleep.sleep(call.level)
        log.info("asleep", level=call.level)
        return self._parts.sleep.state

    def _wake_up(self, call: WakeUp) -> SleepState:
        tags = call.tags
        # Callers that name each part may not know of adapters, and the engine would sleep on.
        self._parts.sleep.wake_up([*tags, ADAPTERS] if tags is not None and WEIGHTS in tags else tags)
        log.info("woken_up", still_asleep=self._parts.sleep.state.tags)
        return self._parts.sleep.state

    def _is_sleeping(self, _: IsSleeping) -> SleepState:
        return self._parts.sleep.state

    def _start_profile(self, call: StartProfile) -> ProfileStarted:
        return ProfileStarted(str(self._parts.profiler.start(call)))

    def _stop_profile(self, _: StopProfile) -> ProfileSaved:
        path = self._parts.profiler.stop()
        return ProfileSaved(str(path), path.stat().st_size)

    def _save_sharded_state(self, call: SaveShardedState) -> ShardedStateSaved:
        self._require_awake(WEIGHTS)
        return self._parts.save_sharded_state(call)

    def _reload_weights(self, call: ReloadWeights) -> WeightsReloaded:
        self._require_awake(WEIGHTS, KV_CACHE)
        return self._parts.reload.reload(call)

    def _collective_rpc(self, call: CollectiveRpc) -> RpcResult:
        methods, engine = self._parts.rpc_methods, self._parts.rpc_engine
        # Check before any rank begins, so that no rank runs a call that another refuses.
        method = methods.check(call.method, call.args, call.kwargs)

        def run() -> Any:
            return methods.run(engine, call.method, call.args, call.kwargs)

        return RpcResult(self._parts.run_in_ranks(call, run, method.changes_model))

    def _execute_dummy_batch(self, _: ExecuteDummyBatch) -> DummyBatchDone:
        self._require_awake(WEIGHTS, KV_CACHE)
        started = time.monotonic()
        self._parts.execute_dummy_batch()
        return DummyBatchDone(time.monotonic() - started)

    def _require_awake(self, *tags: str) -> None:
        asleep = [tag for tag in tags if self._parts.sleep.is_asleep(tag)]
        if asleep:
            raise EngineStateError(f"the engine's {' and '.join(asleep)} sleep; wake them up first")
