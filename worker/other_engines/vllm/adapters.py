# pyright: reportMissingImports=false
# (vLLM is installed in a separate environment.)
"""Low-rank adapters in vLLM. Our library decides which are loaded; vLLM assigns its slots to those of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ....shared.errors import UnsupportedAdapterError
from ....shared.lora.peft_config import read_peft_config
from ...config.engine_config import EngineConfig
from ...engine.adapters.library import AdapterLibrary
from ...engine.scheduling.request import Request
from ...models.adapters.files import AdapterFiles, LoadedAdapter
from .options import lora_setup


class VllmSlots:
    """The adapters that vLLM holds, each under its digest and a number that no other ever has.

    Args:
        engine: ``vllm.v1.engine.core.EngineCore``.
        num_slots: limit of the adapters of a batch, which vLLM's scheduler keeps.

    Attributes:
        requests: vLLM's ``LoRARequest`` by digest.
    """

    are_released = False

    def __init__(self, engine: Any, num_slots: int) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)
        self.num_slots = num_slots
        self.requests: dict[str, Any] = {}

    def share_adapter(self, folder: Path, digest: str) -> None:
        """Do nothing: all ranks of vLLM read an adapter in ``keep_adapter``, between two steps."""

    def keep_adapter(self, loaded: LoadedAdapter) -> None:
        """Have vLLM read an adapter.

        Raises:
            UnsupportedAdapterError: vLLM refuses it, or would leave out a part of it.
            AdapterFileError: a file has changed meanwhile.
        """
        from vllm.lora.request import LoRARequest

        request = LoRARequest(loaded.digest, next(self._numbers), str(loaded.folder))
        try:
            self._read_whole(request)
            loaded.prepared.check_unchanged()
        except BaseException:
            self._engine.remove_lora(request.lora_int_id)
            raise
        self.requests[loaded.digest] = request

    def drop_adapter(self, digest: str) -> None:
        """Have vLLM forget an adapter without users."""
        self._engine.remove_lora(self.requests.pop(digest).lora_int_id)

    def assign(self, slot: int, prepared: Any, digest: str) -> None:
        """Do nothing, since vLLM assigns its slots itself."""

    def _read_whole(self, request: Any) -> None:
        try:
            self._engine.add_lora(request)
            # With pipeline stages, each has other layers.
            unused = set.intersection(*self._engine.collective_rpc(_unused_layers, args=(request.lora_int_id,)))
        except Exception as error:  # vLLM and torch raise anything
            raise UnsupportedAdapterError(f"vLLM refuses the adapter: {error}") from error
        if unused:
            raise UnsupportedAdapterError(
                f"vLLM would leave out {len(unused)} layers of the adapter, such as {min(unused)!r}, which the model "
                "does not have; name an adapter of this model"
            )


def _unused_layers(worker: Any, lora_id: int) -> set[str]:
    """Return the layers of a loaded adapter that a rank's model does not have. Called in vLLM's worker."""
    manager = worker.model_runner.lora_manager._adapter_manager
    return set(manager.get_adapter(lora_id).loras) - set(manager.modules)


def make_library(config: EngineConfig, engine: Any) -> AdapterLibrary[VllmSlots] | None:
    """Return the library of an engine that serves adapters; None for one that serves none."""
    setup = lora_setup(config)
    if setup is None:
        return None
    return AdapterLibrary(
        VllmSlots(engine, setup.max_loras),
        max_adapters=setup.max_cpu_loras,
        folder=Path(config.lora_folder) if config.lora_folder else None,
        load=_check_files,
    )


def adapter_of(library: AdapterLibrary[VllmSlots] | None) -> Callable[[Request], Any]:
    """Return a function that returns vLLM's ``LoRARequest`` for a request; None for the base model."""
    if library is None:
        return lambda _: None
    return lambda request: library.slots.requests.get(library.digest_of(request))


def _check_files(folder: Path, digest: str, _: VllmSlots) -> LoadedAdapter:
    """Refuse what Penstock's engine would. vLLM reads the files later, in the thread of its steps."""
    files = AdapterFiles.read(folder, digest)
    return LoadedAdapter(folder, files.digest, read_peft_config(folder).largest_rank, files)
