"""Builds what control calls act on, around an engine that ``composition`` has built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from ....shared.control import KV_CACHE, WEIGHTS
from ...config import EngineConfig
from ...models.loader import LoadedModel, load_module, load_weights
from ...models.sharded_state import save_sharded_state
from ...models.weights import return_free_memory
from ...progress import ProgressWriter
from ..adapters.library import AdapterLibrary
from ..core import EngineCore
from ..execution.model_runner import ModelRunner
from ..offload.offload import KVOffload
from ..ranks.interface import Ranks
from ..rpc import RpcEngine, RpcMethods, import_rpc_modules
from . import rpc_methods as own_rpc_methods
from .calls import ControlledParts, EngineControl
from .profiling import StepProfiler
from .sleep import EngineSleep, SleepableCache


def load_rpc_methods(config: EngineConfig) -> RpcMethods:
    """Our methods and those of the operator's modules. Raises ``ConfigurationError`` if one cannot be had."""
    return RpcMethods([own_rpc_methods, *import_rpc_modules(config.rpc_modules)])


def compose_control(
    config: EngineConfig,
    folder: Path,
    model: LoadedModel,
    core: EngineCore,
    runner: ModelRunner,
    allocate_cache: Callable[[], None],
    rpc_methods: RpcMethods,
    progress: ProgressWriter,
    ranks: Ranks,
    adapters: AdapterLibrary | None = None,
    offload: KVOffload | None = None,
) -> EngineControl:
    """Put the parts together.

    Args:
        folder: where the model was loaded from.
        allocate_cache: makes the KV cache as it was made at first.
        ranks: what computes the model.
        adapters: None if it serves none.
        offload: what keeps blocks beside it; None if nothing does.
    """
    # Nothing is computed with it, so what is for another device does not matter.
    on_cpu = msgspec.structs.replace(config, device="cpu", quantization=None, attention_backend="auto")
    parts = ControlledParts(
        core=core,
        sleep=_make_sleep(config, folder, model, allocate_cache, ranks, offload),
        profiler=StepProfiler(core, ranks.recorder()),
        rpc_methods=rpc_methods,
        rpc_engine=RpcEngine(config, core, model),
        save_sharded_state=lambda call: save_sharded_state(model, lambda: load_module(on_cpu, folder), folder, call),
        execute_dummy_batch=runner.execute_dummy_batch,
        adapters=adapters,
    )
    return EngineControl(parts, progress)


def _make_sleep(
    config: EngineConfig,
    folder: Path,
    model: LoadedModel,
    allocate_cache: Callable[[], None],
    ranks: Ranks,
    offload: KVOffload | None,
) -> EngineSleep:
    """The weights wake up first: a model that cannot be loaded again should not hold a cache."""

    def load_again() -> torch.nn.Module:
        # What is in no file gets the numbers that it had.
        torch.manual_seed(config.seed)
        return load_weights(config, folder, model)

    device = model.device

    def free_cache() -> None:
        model.forward.allocate(0, config.block_size, 0, device)
        return_free_memory()

    def on_awake() -> None:
        # A cache that woke up before the weights has captured nothing, and a step must not: it might look stalled.
        ranks.awake()
        # The files may hold other weights by now.
        if offload is not None:
            offload.renew_identity()

    cache = SleepableCache(free_cache, allocate_cache)
    return EngineSleep({WEIGHTS: ranks.weights(load_again), KV_CACHE: cache}, on_awake=on_awake)
