"""Options of an engine for low-rank adapters."""

from __future__ import annotations

from typing import Annotated

from ...shared.errors import ConfigurationError
from ...shared.params.lora import LoraSetup
from ..options.groups import OptionGroup
from ..options.numbers import Integer
from ..options.option import Option
from ..options.readers import Folder, Switch

ADAPTERS = "low-rank adapters"


class AdapterOptions(OptionGroup):
    """Options for low-rank adapters: whether they are served, their number and sizes."""

    enable_lora: Annotated[
        bool, Option("serve requests that name a low-rank adapter (LoRA) of the model", Switch(), group=ADAPTERS)
    ] = False
    max_loras: Annotated[int, Option("maximum different adapters in one batch", Integer(1, 1024), group=ADAPTERS)] = 8
    max_lora_rank: Annotated[
        int,
        Option("largest rank of an adapter; on a GPU each slot takes memory for it", Integer(1, 4096), group=ADAPTERS),
    ] = 64
    max_cpu_loras: Annotated[
        int,
        Option(
            "maximum adapters in host memory; at least as many as in one batch",
            Integer(1, 65_536),
            group=ADAPTERS,
        ),
    ] = 32
    lora_folder: Annotated[
        str,
        Option(
            "folder of adapters, each in a subfolder named by its digest; a request may also name an absolute path",
            Folder(),
            group=ADAPTERS,
        ),
    ] = ""

    @property
    def lora_setup(self) -> LoraSetup | None:
        """Limits of adapters; None if adapters are not served."""
        if not self.enable_lora:
            return None
        return LoraSetup(max_loras=self.max_loras, max_lora_rank=self.max_lora_rank, max_cpu_loras=self.max_cpu_loras)


def check_adapters(options: AdapterOptions, engine: str) -> None:
    """Raise ``ConfigurationError`` if adapters are enabled but cannot be served."""
    if not options.enable_lora:
        return
    if engine != "penstock":
        raise ConfigurationError(
            f"enable_lora is for Penstock's own engine; engine {engine!r} serves no adapters under the queue"
        )
    if options.max_cpu_loras < options.max_loras:
        raise ConfigurationError(
            f"max_cpu_loras ({options.max_cpu_loras}) must be at least max_loras ({options.max_loras}): adapters of a "
            f"batch are in the host's memory too"
        )
