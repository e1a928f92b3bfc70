"""What the engine core needs of its ranks, and how it is where there is only one: the core itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from ....shared.control.rpc import CollectiveRpc
from ....shared.messages.ranks import RankSetup
from ...models.attention.page_layout import PageLayout
from ...models.loaded import LoadedModel
from ...models.weights.movable import Exchange
from ..control.sleep import Sleepable
from ..control.traces import TraceRecorder
from ..execution.kv_cache import KVCacheSize


class Ranks(Protocol):
    """All that compute the model of an engine."""

    def load(self) -> LoadedModel:
        """Load the model; what is asked of its forward is done by all ranks.

        Raises:
            ModelLoadError, ConfigurationError: it does not fit, on whatever rank.
        """
        ...

    def size_cache(self, pages: PageLayout | None = None) -> KVCacheSize:
        """Decide how large the KV cache is, once the model is loaded; caches have to be allocated afterwards, in
        ``pages`` if there are any.

        Raises:
            ConfigurationError: not one request fits; says which option to change.
        """
        ...

    def weights(self, load_again: Callable[[], nn.Module]) -> Sleepable:
        """The weights of all ranks; ``load_again`` makes this one's anew."""
        ...

    def exchange(self, load: Callable[[Path], nn.Module]) -> Exchange:
        """What puts other weights in the place of those of all ranks; ``load`` makes this one's of a folder."""
        ...

    def live_state(self, make_module: Callable[[], PreTrainedModel], folder: Path) -> dict[str, Tensor]:
        """All weights as they are in memory, by the names of the checkpoint, on the CPU.

        Args:
            make_module: makes transformers' module of the whole model.
            folder: to write into meanwhile; nothing is left there.

        Raises:
            ModelLoadError: the module is of another form than the model.
            EngineStateError: there is no room for what ranks write.
        """
        ...

    def awake(self) -> None:
        """All that slept is back: capture what a forward needs to have captured."""
        ...

    def recorder(self) -> TraceRecorder:
        """What records profiles."""
        ...

    def run_method(self, call: CollectiveRpc, run: Callable[[], Any], changes_model: bool) -> Any:
        """Run a registered method in all ranks, in this one by ``run``; returns plain data.

        Of one rank that is what the method returned, of several a list in their order.

        Args:
            changes_model: ranks whose weights may differ afterwards must not go on.

        Raises:
            EngineCallError: it failed in one of several ranks, which the message names.
            EngineDeadError: the same of a method that ``changes_model``. The engine ends.
        """
        ...

    def setup(self, num_blocks: int, pages: PageLayout | None = None) -> RankSetup | None:
        """What to tell of them; None where there is one."""
        ...

    def close(self) -> None:
        """End those above 0."""
        ...
