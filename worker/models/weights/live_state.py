"""The weights of a loaded model by the names of its checkpoint: as they are in memory, whatever the files contain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ....shared.errors import ModelLoadError
from ...config.engine_config import EngineConfig
from ..checkpoint.errors import few
from ..checkpoint.model_config import read_config
from ..images.vision_encoder import text_module
from ..images.vision_model import is_vision_type
from ..lean.layers.decoder import LeanDecoder
from ..loaded import LoadedModel
from ..loading.loader import load_module
from ..pooling.encoder import EncoderForward
from ..pooling.loading import as_decoder
from .give_back import give_back, put_modules


@torch.inference_mode()
def live_state(model: LoadedModel, make_module: Callable[[], PreTrainedModel]) -> dict[str, Tensor]:
    """Return all weights on the CPU, in their dtypes; shared ones once.

    Packed weights are unpacked, so this may take as much memory as the weights themselves.

    Args:
        make_module: creates transformers' module of the model, with any weights or none. Weights that the engine does
            not hold stay as created: the head of a model that pools, an omitted vision encoder.

    Raises:
        ModelLoadError: the module has another form than the model, or the engine lacks weights that it needs.
    """
    module = make_module()
    text = text_of(model, module)
    if isinstance(model.network, LeanDecoder):
        give_back(model.network, text)
    else:
        put_modules(model.network, text)
    share_vision_encoder(model, module)
    return checkpoint_state(model, module)


def checkpoint_state(model: LoadedModel, module: PreTrainedModel) -> dict[str, Tensor]:
    """Return the ``plain_state`` of ``module``, which has the weights of ``model``, by the names of the model's
    files.
    """
    if model.weight_conversions is not None:
        cast(Any, module)._weight_conversions = model.weight_conversions
    return plain_state(module)


def empty_module(config: EngineConfig, folder: Path, model: LoadedModel) -> PreTrainedModel:
    """Create transformers' module of ``model`` for ``live_state``.

    It takes no memory, unless a part of the weights is not held and must be read from the files.

    Raises: as ``load_model``.
    """
    # Nothing is computed with it, so options for other devices do not matter.
    on_cpu = msgspec.structs.replace(config, device="cpu", quantization=None, attention_backend="auto")
    model_config = read_config(folder, on_cpu)
    if model.pooling is not None or is_vision_type(model_config):
        return load_module(on_cpu, folder)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            model_config, dtype=model.dtype, trust_remote_code=config.trust_remote_code, attn_implementation="eager"
        )


def plain_state(module: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of ``module`` by their names in the model's files, on the CPU; shared ones once.

    Raises:
        ModelLoadError: some have no content.
    """
    state: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        state |= {prefix + key: value for key, value in part._parameters.items() if value is not None}
        persistent = part._buffers.keys() - part._non_persistent_buffers_set
        state |= {
            prefix + key: value for key, value in part._buffers.items() if value is not None and key in persistent
        }
    # Compared on the device, since two tensors there need no copy to the CPU.
    for name, source in (getattr(module, "all_tied_weights_keys", None) or {}).items():
        if name in state and source in state and _is_same(state[name], state[source]):
            del state[name]
    empty = sorted(name for name, tensor in state.items() if tensor.is_meta)
    if empty:
        raise ModelLoadError(f"the engine does not hold {few(empty)}, which the model's files have")
    # transformers fuses the weights of some architectures while loading; the files have them unfused.
    return {name: tensor.detach().cpu() for name, tensor in revert_weight_conversion(module, state).items()}


def text_of(model: LoadedModel, module: PreTrainedModel) -> PreTrainedModel:
    """Return the part of ``module``, transformers' own, that the network of ``model`` was built from."""
    if model.pooling is not None:
        return module if isinstance(model.forward, EncoderForward) else as_decoder(module, model.architecture)
    return text_module(module) if is_vision_type(module.config) else module


def share_vision_encoder(model: LoadedModel, module: PreTrainedModel) -> None:
    """Let ``module`` use the weights of the vision encoder of ``model``, if it has one."""
    if model.vision is not None:
        put_modules(model.vision.encoder.module, cast(Any, module).model)


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    return tensor is other or (tensor.is_meta and other.is_meta) or torch.equal(tensor, other)
