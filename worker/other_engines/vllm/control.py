"""Control calls to vLLM's core, executed by vLLM's utilities."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ....shared.control.calls import Utility, UtilityAnswer
from ....shared.control.engine import (
    ADAPTERS,
    ENCODER,
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
    Sleep,
    SleepState,
    StartProfile,
    StopProfile,
    WakeUp,
)
from ....shared.control.model import SaveShardedState, ShardedStateSaved
from ....shared.errors import EngineStateError, UnsupportedCallError
from ....shared.messages.core import UtilityCall, UtilityOutput
from ...core.answers import CallAnswers
from ...engine.adapters.calls import adapter_calls
from ...engine.adapters.library import AdapterLibrary
from ...processes.progress import ProgressWriter
from .adapters import VllmSlots
from .core import VllmCore

_MAY_TAKE_LONG = frozenset({Sleep, WakeUp, StartProfile, StopProfile, SaveShardedState, ExecuteDummyBatch})


class VllmControl:
    """Handler that translates our control calls to vLLM's.

    Args:
        engine: ``vllm.v1.engine.core.EngineCore``, which ``core`` uses.
        library: adapters; None for an engine that serves none.
    """

    def __init__(
        self, engine: Any, core: VllmCore, progress: ProgressWriter, library: AdapterLibrary[VllmSlots] | None
    ) -> None:
        self._engine = engine
        self._core = core
        self._sleep_level = 0
        self._profile_began_s = 0.0
        functions: dict[type, Callable[[Any], UtilityAnswer | None]] = {
            CheckInvariants: self._check_invariants,
            ResetPrefixCache: self._reset_prefix_cache,
            ResetInputCache: self._reset_input_cache,
            Sleep: self._sleep,
            WakeUp: self._wake_up,
            IsSleeping: self._is_sleeping,
            StartProfile: self._start_profile,
            StopProfile: self._stop_profile,
            SaveShardedState: self._save_sharded_state,
            CollectiveRpc: self._refuse_rpc,
            ExecuteDummyBatch: self._execute_dummy_batch,
            **adapter_calls(library),
        }
        self._answers = CallAnswers(functions, progress, _takes_long)

    def answer(self, message: UtilityCall) -> UtilityOutput | None:
        """Implement ``Control``."""
        return self._answers.answer(message)

    def _check_invariants(self, _: CheckInvariants) -> Invariants:
        scheduler = self._engine.scheduler
        num_running, num_waiting = scheduler.get_request_counts()
        pool = scheduler.kv_cache_manager.block_pool
        return Invariants(pool.get_num_free_blocks(), pool.num_gpu_blocks, num_running, num_waiting)

    def _reset_prefix_cache(self, _: ResetPrefixCache) -> PrefixCacheReset:
        return PrefixCacheReset(bool(self._engine.reset_prefix_cache()))

    def _reset_input_cache(self, call: ResetInputCache) -> InputCacheReset:
        """Reset a cache. Reports 0 entries, since vLLM does not report their number and without images it has none."""
        if call.cache == ENCODER:
            self._engine.reset_encoder_cache()
        else:
            self._engine.reset_mm_cache()
        return InputCacheReset(0)

    def _sleep(self, call: Sleep) -> SleepState:
        if not self._engine.vllm_config.model_config.enable_sleep_mode:
            raise UnsupportedCallError(
                "sleep: vLLM's sleep mode is off; start with --enable-sleep-mode in --engine-options"
            )
        if self._core.num_unfinished_requests:
            raise EngineStateError(
                f"the engine cannot sleep while it holds requests ({self._core.num_unfinished_requests})"
            )
        if call.level > self._sleep_level:
            self._engine.sleep(call.level)
            self._sleep_level = call.level
        return self._state()

    def _wake_up(self, call: WakeUp) -> SleepState:
        # It has no part for adapters, and no tags would mean all.
        tags = None if call.tags is None else [tag for tag in call.tags if tag != ADAPTERS]
        if self._sleep_level and tags != []:
            self._engine.wake_up(tags)
        return self._state()

    def _is_sleeping(self, _: IsSleeping) -> SleepState:
        return self._state()

    def _state(self) -> SleepState:
        tags = sorted(self._engine.model_executor.sleeping_tags, reverse=True)
        if not tags:
            self._sleep_level = 0
        return SleepState(self._sleep_level, tags)

    def _profile_folder(self) -> Path:
        config = self._engine.vllm_config.profiler_config
        if config is None or config.profiler != "torch":
            raise EngineStateError("vLLM records no profiles; start the worker with --profile-dir")
        return Path(config.torch_profiler_dir)

    def _start_profile(self, call: StartProfile) -> ProfileStarted:
        if call != StartProfile():
            raise UnsupportedCallError(
                "start_profile: vLLM's own options choose names, stacks and compression; leave prefix, with_stack and "
                "use_gzip out, and set them by --engine-options"
            )
        folder = self._profile_folder()
        if self._profile_began_s:
            raise EngineStateError("a profile is being recorded already; stop it first")
        folder.mkdir(parents=True, exist_ok=True)
        self._profile_began_s = time.time()
        self._engine.profile(True)
        return ProfileStarted(str(folder))

    def _stop_profile(self, _: StopProfile) -> ProfileSaved:
        folder, began_s = self._profile_folder(), self._profile_began_s
        if not began_s:
            raise EngineStateError("no profile is being recorded; start one first")
        self._profile_began_s = 0.0
        former_traces = set(folder.rglob("*.json*"))
        self._engine.profile(False)
        # vLLM also writes a table, which is not JSON.
        traces = sorted(set(folder.rglob("*.json*")) - former_traces)
        if not traces:
            raise EngineStateError(f"vLLM has written no trace to {folder}")
        return ProfileSaved(str(traces[0]), traces[0].stat().st_size)

    def _save_sharded_state(self, call: SaveShardedState) -> ShardedStateSaved:
        folder = Path(call.path)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise EngineStateError(f"path {call.path} is not empty")
        self._engine.save_sharded_state(call.path, call.pattern, call.max_size)
        files = sorted(file for file in folder.iterdir() if file.is_file())
        return ShardedStateSaved(call.path, [file.name for file in files], sum(file.stat().st_size for file in files))

    def _execute_dummy_batch(self, _: ExecuteDummyBatch) -> DummyBatchDone:
        if self._sleep_level:
            raise EngineStateError("the engine sleeps; wake it up first")
        started = time.monotonic()
        self._engine.execute_dummy_batch()
        return DummyBatchDone(time.monotonic() - started)

    def _refuse_rpc(self, _: CollectiveRpc) -> UtilityAnswer:
        raise UnsupportedCallError("collective_rpc: only Penstock's engine has methods that can be called by name")


def _takes_long(call: Utility) -> bool:
    return type(call) in _MAY_TAKE_LONG
