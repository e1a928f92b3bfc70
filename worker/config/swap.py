"""Options for a device that several models share: which models, how much memory, and when they swap."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...shared.swap.views import SwapOptions
from ..options.numbers import Seconds, Share, Size
from ..options.option import Option
from ..options.readers import BandSeconds, Choice, Folder, Reader

SWAP = "swap"
LOAD_AT_START = ("all", "first", "none")
_MOST_BYTES = 1 << 50


class SharingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``worker start`` for several models on one device."""

    models: Annotated[
        str,
        Option("TOML file of models, each with its own options", Reader("FILE"), default="none", group=SWAP),
    ] = ""
    models_folder: Annotated[
        str,
        Option("serve each model folder and each .gguf file in this folder", Folder(), default="none", group=SWAP),
    ] = ""
    device_memory: Annotated[
        int | None,
        Option(
            "memory of a device for all its models together",
            Size(1 << 20, _MOST_BYTES),
            default="0.9 of what is free on a GPU, 0.4 on the CPU",
            group=SWAP,
        ),
    ] = None
    host_memory: Annotated[
        int | None,
        Option(
            "memory of the host for weights of sleeping models (level 1)",
            Size(0, _MOST_BYTES),
            default="half of what is free with GPUs; none on the CPU",
            group=SWAP,
        ),
    ] = None
    max_swap_share: Annotated[
        float,
        Option(
            "most of the time that swaps away from working models may take",
            Share(0.5),
            group=SWAP,
        ),
    ] = 0.2
    max_wait: Annotated[
        dict[str, float] | None,
        Option(
            "time that a request waits for its model before it may exceed that share",
            BandSeconds(),
            default="60, batch=900",
            group=SWAP,
        ),
    ] = None
    patience: Annotated[
        dict[str, float] | None,
        Option(
            "time that a request waits before a working model must leave for its model",
            BandSeconds(),
            default="interactive=1, standard=5, batch=120",
            group=SWAP,
        ),
    ] = None
    min_awake: Annotated[float, Option("time that a working model stays", Seconds(0), group=SWAP)] = 0.0
    idle_sleep: Annotated[
        float, Option("time without requests until a model sleeps; 0: never", Seconds(0), group=SWAP)
    ] = 300.0
    idle_unload: Annotated[
        float, Option("time without requests until its process ends; 0: never", Seconds(0), group=SWAP)
    ] = 1800.0
    load_at_start: Annotated[
        str,
        Option(
            "models to load before the worker is ready; all: one after the other", Choice(*LOAD_AT_START), group=SWAP
        ),
    ] = "first"

    @property
    def swap_options(self) -> SwapOptions:
        """Options of the rule."""
        return SwapOptions(
            max_share=self.max_swap_share,
            patience_s=self.patience or {},
            max_wait_s=self.max_wait or {},
            min_awake_s=self.min_awake,
            idle_sleep_s=self.idle_sleep,
            idle_unload_s=self.idle_unload,
        )
