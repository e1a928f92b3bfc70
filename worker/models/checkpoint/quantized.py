"""Load a checkpoint of quantized weights: each is unpacked while transformers puts it into its module."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..formats.declared import Quantization, declared_quantization
from ..formats.reading import dtype_of, read_plain
from ..formats.tensors import Readable, StoredTensors, Unpacked
from ..gguf.tensors import read_gguf
from ..placing.file_numbers import mark_weights, supported_dtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_GENERATION_FILE = "generation_config.json"


def load_quantized(
    folder: Path, quantization: Quantization, auto_class: Any, dtype: torch.dtype | str, how: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load the module of ``how["config"]``, with all weights in ``dtype``; return it with transformers' loading info.

    Memory holds the finished weights and, per thread, one packed tensor with a piece in float32.

    Args:
        auto_class: of transformers, which knows the module's class.
        dtype: "auto" for that of the configuration, else of the tensors that are not quantized.
        how: arguments of ``from_pretrained``.

    Raises:
        ModelLoadError: the tensors of the format do not fit each other. The module is not checked yet.
    """
    config = how["config"]
    with torch.device("meta"):
        empty = auto_class.from_config(config, trust_remote_code=how["trust_remote_code"])
    tensors, chosen = _open_requested(folder, quantization, config, dtype)
    loaded: Any = type(empty).from_pretrained(
        None, state_dict=_without_empty_biases(tensors, empty), dtype=chosen, **{**how, "config": empty.config}
    )
    module, info = loaded
    if dtype == "auto":
        mark_weights(module, tensors)
    if (folder / _GENERATION_FILE).is_file():
        # Imported late, since ``open_tensors`` is used without transformers.
        from transformers import GenerationConfig

        module.generation_config = GenerationConfig.from_pretrained(folder)
    return module, info


def plain_names(folder: Path, model_config: PretrainedConfig) -> set[str]:
    """Return the names of all tensors in the files, as they are after unpacking."""
    quantization = declared_quantization(folder)
    if quantization is not None:
        return set(_open_requested(folder, quantization, model_config, "auto")[0])
    return set(StoredTensors(folder))


def _open_requested(
    folder: Path, quantization: Quantization, model_config: PretrainedConfig, dtype: torch.dtype | str
) -> tuple[Readable, torch.dtype]:
    """Return the tensors and the dtype of those that are quantized."""
    declared = model_config.get_text_config().dtype if dtype == "auto" else dtype
    requested: torch.dtype | None = getattr(torch, declared) if isinstance(declared, str) else declared
    # Some configurations have the dtype in which weights are stored.
    requested = None if requested is not None and requested.itemsize == 1 else requested
    if requested is None:
        requested = torch.bfloat16 if quantization.method == "gguf" else dtype_of(StoredTensors(folder))
    if dtype == "auto" and quantization.method != "gguf":
        requested = supported_dtype(requested)
    return open_tensors(folder, requested), requested


def open_tensors(folder: Path, dtype: torch.dtype) -> Readable:
    """Return the tensors of a folder by name, which keep its files open.

    Quantized ones are unpacked to ``dtype`` when they are read.

    Raises:
        ModelLoadError: the files cannot be read, or the tensors of a format do not fit each other.
    """
    quantization = declared_quantization(folder)
    if quantization is not None and quantization.method == "gguf":
        return read_gguf(Path(quantization.settings["file"]), dtype)
    stored = StoredTensors(folder)
    if quantization is None:
        return {name: stored.slice(name) for name in stored}
    return read_plain(stored, quantization, dtype)


def _without_empty_biases(tensors: Readable, empty: PreTrainedModel) -> Readable:
    """Drop the biases of zeros that GPTQ adds to layers that have none."""
    existing = empty.state_dict().keys()
    prefix = f"{empty.base_model_prefix}."
    layers = (name.removesuffix("weight") for name, tensor in tensors.items() if isinstance(tensor, Unpacked))
    biases = {f"{layer}bias" for layer in layers} & tensors.keys()
    absent = (name for name in biases if not {name, prefix + name} & existing)
    left_out = {name for name in absent if not tensors[name][...].any()}
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}
