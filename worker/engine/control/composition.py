"""Builds the parts that control calls act on, for an engine that ``engine/composition.py`` has built."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ....shared.control.engine import ADAPTERS, KV_CACHE, WEIGHTS
from ....shared.control.model import SaveShardedState, ShardedStateSaved
from ...config.engine_config import EngineConfig
from ...models.adapters.slots import AdapterSlots
from ...models.lean.captured import without_graphs
from ...models.loaded import LoadedModel
from ...models.loading.preparing import rescale_eight_bit_cache
from ...models.loading.stored import load_stored
from ...models.placing.device import return_free_memory
from ...models.weights.stored_files import save_sharded_state
from ..adapters.library import AdapterLibrary
from ..core.engine_core import EngineCore
from ..execution.kv_cache import KVCacheSize
from ..execution.model_runner import ModelRunner
from ..offload.offload import KVOffload
from ..ranks.interface import Ranks
from ..rpc import RpcEngine, RpcMethods
from .calls import ControlledParts
from .reload import WeightsReload, WeightsSource
from .sleep import EngineSleep, Sleepable, SleepableCache
from .traces import StepProfiler


def compose_control(
    config: EngineConfig,
    source: WeightsSource,
    model: LoadedModel,
    size: KVCacheSize,
    core: EngineCore,
    runner: ModelRunner,
    allocate_cache: Callable[[], None],
    rpc_methods: RpcMethods,
    ranks: Ranks,
    adapters: AdapterLibrary[AdapterSlots] | None = None,
    offload: KVOffload | None = None,
    *,
    report: Callable[[], None],
) -> ControlledParts:
    """Build the parts that control calls act on.

    Args:
        allocate_cache: allocate the KV cache with its original size, ``size``.
        ranks: the ranks that compute the model.
        adapters: None if the engine serves no adapters.
        offload: None if the engine offloads no KV blocks.
        report: called after each layer that is packed again, which takes long.
    """
    changing = _ChangingParts(config, source, model, size, allocate_cache, ranks, offload, report)
    parts: dict[str, Sleepable] = {WEIGHTS: changing.weights, KV_CACHE: changing.cache}
    if adapters is not None:
        parts[ADAPTERS] = adapters.slots
    sleep = EngineSleep(parts, on_awake=changing.on_awake)
    if config.defers_cache:
        sleep.defer(KV_CACHE)
    return ControlledParts(
        sleep=sleep,
        profiler=StepProfiler(core, ranks.recorder()),
        rpc_methods=rpc_methods,
        rpc_engine=RpcEngine(config, core, model, pages=size.pages),
        run_in_ranks=ranks.run_method,
        save_sharded_state=partial(_save_sharded_state, config, source, model, ranks),
        execute_dummy_batch=runner.execute_dummy_batch,
        reload=WeightsReload(
            config,
            source,
            model,
            core,
            ranks.exchange(changing.load),
            changing.cache,
            changing.refit,
            changing.settle,
            runner.execute_dummy_batch,
        ),
        adapters=adapters,
    )


def _save_sharded_state(
    config: EngineConfig, source: WeightsSource, model: LoadedModel, ranks: Ranks, call: SaveShardedState
) -> ShardedStateSaved:
    # Imported late, because it needs transformers, which an engine that saves nothing may not need.
    from ...models.weights.live_state import empty_module

    read_state = partial(ranks.live_state, lambda: empty_module(config, source.folder, model))
    return save_sharded_state(model, read_state, [source.tokenizer_folder, source.folder], call)


class _ChangingParts:
    """The weights and caches that are released, restored or replaced while the engine runs."""

    def __init__(
        self,
        config: EngineConfig,
        source: WeightsSource,
        model: LoadedModel,
        size: KVCacheSize,
        allocate_cache: Callable[[], None],
        ranks: Ranks,
        offload: KVOffload | None,
        report: Callable[[], None],
    ) -> None:
        self._report = report
        self._config = config
        self._source = source
        self._model = model
        self._size = size
        self._allocate_cache = allocate_cache
        self._ranks = ranks
        self._offload = offload
        self._device = model.device
        # The weights wake up first, so that a model that cannot be loaded again holds no cache.
        self.weights = ranks.weights(lambda: self.load(source.folder))
        self.cache = SleepableCache(self._free_cache, allocate_cache)

    def load(self, folder: Path) -> torch.nn.Module:
        """Load the network from ``folder``."""
        stored = load_stored(self._config, folder)
        if stored is not None:
            return stored.weights
        # Imported late, as above.
        from ...models.loading.loader import load_weights

        # Seed again, so that weights that are in no file get their former values.
        torch.manual_seed(self._config.seed)
        return load_weights(self._config, folder, self._model, self._report)

    @torch.inference_mode()
    def refit(self) -> None:
        """Choose the scales of an eight-bit cache again, and leave the cache unallocated."""
        name, model = self._config.eight_bit_cache, self._model
        if name is not None:
            forward = model.forward
            rescale_eight_bit_cache(without_graphs(forward), name, model.vocab_size, self._size.max_model_len)
            self._free_cache()

    def settle(self) -> None:
        """Capture graphs and renew the identity of offloaded blocks. Weights and cache must be in place."""
        # A cache that woke up before the weights has captured nothing. A step must not capture: it would look stalled.
        self._ranks.awake()
        # Renew it, because the weights may have changed.
        if self._offload is not None:
            self._offload.renew_identity()

    def on_awake(self) -> None:
        """Prepare to compute after a sleep. The files may contain other weights than before."""
        if self._config.eight_bit_cache is not None:
            self.refit()
            self._allocate_cache()
        self.settle()

    def _free_cache(self) -> None:
        self._model.forward.allocate(0, self._config.block_size, 0, self._device)
        return_free_memory()
