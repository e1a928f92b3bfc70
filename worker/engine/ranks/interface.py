"""The interface of the engine core to its ranks. With a single rank, the core computes the model itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from ....shared.control.engine import CollectiveRpc
from ....shared.messages.core import RankSetup
from ...models.adapters.slots import AdapterSlots
from ...models.attention.page_layout import PageLayout
from ...models.loaded import LoadedModel
from ...models.weights.movable import Exchange
from ..control.sleep import Sleepable
from ..control.traces import TraceRecorder
from ..execution.kv_cache import KVCacheSize
from ..offload.blocks import DeviceBlocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Ranks(Protocol):
    """All ranks of an engine, which compute its model together."""

    def load(self, report: Callable[[], None]) -> LoadedModel:
        """Load the model, without images if it cannot read them here. Its forward runs every call on all ranks.

        Args:
            report: called after each layer whose packing takes long.

        Raises:
            ModelLoadError, ConfigurationError: the model does not fit on one of the ranks.
        """
        ...

    def attach_adapters(self) -> AdapterSlots:
        """Give all ranks slots for adapters, and return those of this rank. Call it after ``load``, before memory is
        measured.

        Raises:
            ConfigurationError: the model's mode does not support adapters.
        """
        ...

    def size_cache(self, pages: PageLayout | None = None) -> KVCacheSize:
        """Return the size of the KV cache. Call it after ``load`` and before the caches are allocated.

        Args:
            pages: the layout of pages; None for one block table.

        Raises:
            ConfigurationError: not a single request fits; the message names the option to change.
        """
        ...

    def device_blocks(self) -> DeviceBlocks:
        """Return copies of the blocks of the KV caches, with the parts of all ranks. The caches must be allocated."""
        ...

    def block_identity(self) -> bytes | None:
        """Return the identity of the blocks of all ranks; see ``offload.blocks.identity_of``."""
        ...

    def weights(self, load_again: Callable[[], nn.Module]) -> Sleepable:
        """Return the weights of all ranks; ``load_again`` reloads those of this rank."""
        ...

    def exchange(self, load: Callable[[Path], nn.Module]) -> Exchange:
        """Return the exchange of the weights of all ranks; ``load`` loads those of this rank from a folder."""
        ...

    def live_state(self, make_module: Callable[[], PreTrainedModel], folder: Path) -> dict[str, Tensor]:
        """Return all weights as they are in memory, on the CPU, by the names of the checkpoint.

        Args:
            make_module: create transformers' module of the whole model.
            folder: for temporary files, which are removed.

        Raises:
            ModelLoadError: the module does not have the form of the model.
            EngineStateError: the disk has no space for the temporary files.
        """
        ...

    def awake(self) -> None:
        """Capture the graphs that a forward needs. Called after all sleeping parts are awake."""
        ...

    def recorder(self) -> TraceRecorder:
        """Return the recorder of profiles."""
        ...

    def run_method(self, call: CollectiveRpc, run: Callable[[], Any], changes_model: bool) -> Any:
        """Run a registered method in all ranks, in this one by ``run``, and return plain data.

        With one rank that is the method's result, with several the list of results in the order of ranks.

        Args:
            changes_model: end the engine if the method fails, because the weights of the ranks may differ then.

        Raises:
            EngineCallError: it failed in one of several ranks, which the message names.
            EngineDeadError: the same for a method that ``changes_model``. The engine ends.
        """
        ...

    def setup(self, num_blocks: int, pages: PageLayout | None = None) -> RankSetup | None:
        """Return the description of the ranks for the worker process; None for a single rank."""
        ...

    def close(self) -> None:
        """End the ranks above 0."""
        ...
