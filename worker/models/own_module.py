"""transformers' own module of a model, as it is before anything of ours is done to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from ...shared.errors import ModelLoadError
from ..config.engine_config import EngineConfig
from .checkpoint.errors import first_line
from .checkpoint.load import load_checkpoint
from .images.seeing import check_served, is_seeing_type
from .pooling.folder import pools
from .pooling.loading import load_pooling_module
from .weights.movable import return_free_memory


def read_module(
    folder: Path,
    model_config: PretrainedConfig,
    architecture: str,
    config: EngineConfig,
    device: torch.device,
    **options: Any,
) -> PreTrainedModel:
    """Load transformers' own module of ``model_config`` onto ``device``, from ``folder`` or with random weights.

    Args:
        options: of ``from_pretrained``.

    Raises:
        ModelLoadError: a file or the architecture is not what we can run; says which.
    """
    check_served(model_config, architecture)
    if not config.needs_weights:
        return _draw_module(model_config, architecture, config, device)
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    load = load_pooling_module if pools(folder, model_config, config.runner) else _load_generating
    module = load(
        folder, model_config, architecture, dtype=dtype, trust_remote_code=config.trust_remote_code, **options
    )
    # What quantised weights were unpacked in would stay with the allocator.
    return_free_memory()
    torch.nn.Module.to(module, device)
    return module.eval()


def _load_generating(
    folder: Path, model_config: PretrainedConfig, architecture: str, **options: Any
) -> PreTrainedModel:
    return load_checkpoint(folder, model_config, architecture, auto_class=_auto_class(model_config), **options)


def _auto_class(model_config: PretrainedConfig) -> Any:
    return AutoModelForImageTextToText if is_seeing_type(model_config) else AutoModelForCausalLM


def _draw_module(
    model_config: PretrainedConfig, architecture: str, config: EngineConfig, device: torch.device
) -> PreTrainedModel:
    """A model of random weights, made where it computes: 8B parameters take seconds on a GPU, minutes on a host."""
    dtype = getattr(torch, config.dtype) if config.dtype != "auto" else model_config.dtype or torch.float32
    try:
        with device:
            module = _auto_class(model_config).from_config(
                model_config, dtype=dtype, trust_remote_code=config.trust_remote_code, attn_implementation="eager"
            )
    except Exception as error:  # whatever the architecture's own code raises
        raise ModelLoadError(f"{architecture} cannot be made from its config: {first_line(error)}") from error
    return module.eval()
