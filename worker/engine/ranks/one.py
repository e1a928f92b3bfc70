"""The only rank of an engine whose core computes the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ....shared.control.engine import CollectiveRpc
from ....shared.messages.core import RankSetup
from ...config.engine_config import EngineConfig
from ...data_parallel.composition import check_rank, meet_ranks
from ...models.adapters.slots import AdapterSlots
from ...models.attention.page_layout import PageLayout
from ...models.loaded import LoadedModel
from ...models.loading.stored import load_stored
from ...models.weights.movable import Exchange, ModelWeights, WeightsExchange
from ..control.sleep import Sleepable
from ..control.traces import ProcessTraceRecorder, TraceRecorder
from ..execution.kv_cache import KVCacheSize
from ..offload.blocks import DeviceBlocks, identity_of, make_device_blocks
from ..setup.checks import check_images
from ..setup.host import set_num_threads
from .adapters import attach_slots
from .memory import capture_again, measure_rank, size_for_all

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OneRank:
    """See ``interface.Ranks``.

    Args:
        model: a model that was already loaded from ``folder`` with the same options of loading, and that no other
            engine uses any more; None to load it.
    """

    def __init__(self, config: EngineConfig, folder: Path, model: LoadedModel | None = None) -> None:
        self._config = config
        self._folder = folder
        self._model = model

    @property
    def model(self) -> LoadedModel:
        assert self._model is not None, "call load first"
        return self._model

    def load(self, report: Callable[[], None]) -> LoadedModel:
        model = self._model or load_stored(self._config, self._folder) or self._load_from_the_beginning(report)
        set_num_threads(self._config, model)
        self._model = check_images(check_rank(model))
        return self._model

    def _load_from_the_beginning(self, report: Callable[[], None]) -> LoadedModel:
        # Imported late, because transformers takes seconds to import, and a stored model does not need it.
        from ...models.loading.loader import load_model

        return load_model(self._config, self._folder, expert_ranks=meet_ranks(self._config), report=report)

    def attach_adapters(self) -> AdapterSlots:
        return attach_slots(self._config, self.model)

    def size_cache(self, pages: PageLayout | None = None) -> KVCacheSize:
        return size_for_all(self._config, self.model, [measure_rank(self.model, self._config)], pages)

    def device_blocks(self) -> DeviceBlocks:
        return make_device_blocks(lambda: self.model.forward.caches, self.model.device)

    def block_identity(self) -> bytes | None:
        return identity_of(self._config, self._folder, self.model)

    def weights(self, load_again: Callable[[], nn.Module]) -> Sleepable:
        return ModelWeights(self.model.weights, load_again)

    def exchange(self, load: Callable[[Path], nn.Module]) -> Exchange:
        return WeightsExchange(ModelWeights(self.model.weights, lambda: self.model.weights), load)

    def live_state(self, make_module: Callable[[], PreTrainedModel], folder: Path) -> dict[str, Tensor]:
        # Imported late, as above.
        from ...models.weights.live_state import live_state

        return live_state(self.model, make_module)

    def awake(self) -> None:
        capture_again(self.model)

    def recorder(self) -> TraceRecorder:
        return ProcessTraceRecorder(self._config)

    def run_method(self, call: CollectiveRpc, run: Callable[[], Any], changes_model: bool) -> Any:
        return run()

    def setup(self, num_blocks: int, pages: PageLayout | None = None) -> RankSetup | None:
        return None

    def close(self) -> None:
        """Do nothing, because this rank starts no process."""
