"""Read a PEFT folder as pairs of matrices per layer, and check them against the layers of a loaded model.

An adapter of a model that reads images was trained on the whole model, which contains the text decoder as a part.
Engines compute the text decoder by itself. So its layers have longer names in the adapter than in the engine, and
layers of the vision encoder have none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ....shared.errors import AdapterFileError, UnsupportedAdapterError
from ....shared.lora.peft_config import PeftConfig, read_peft_config
from ....shared.params.lora import WEIGHTS_FILE

_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
# Suffixes of unsupported tensors, and the feature that an adapter with them uses.
_KINDS = {
    ".lora_embedding_A": "embeddings of its own",
    ".lora_embedding_B": "embeddings of its own",
    ".lora_magnitude_vector": "DoRA, which scales the columns of merged weights",
    ".lora_magnitude_vector.weight": "DoRA, which scales the columns of merged weights",
    ".bias": "biases of its own",
}

# Prefixes of the text decoder: in transformers, in transformers before 4.52, and in models like Idefics3.
_TEXT_PARTS = ("model.language_model.", "language_model.model.", "model.text_model.")
_ALONE = "model."
# Parts of names of modules that read images.
_VISION_PARTS = ("vision", "visual", "projector", "connector", "merger", "resampler")


def name_in_engine(layer: str, layers: Collection[str]) -> str:
    """Return the name among ``layers`` of the adapter's ``layer``; ``layer`` itself if there is none.

    An adapter may have been trained on the base model alone, and be used with a head, or the other way round.
    """
    if layer in layers:
        return layer
    names = [_ALONE + layer.removeprefix(part) for part in _TEXT_PARTS if layer.startswith(part)]
    base = next(iter(layers), "").partition(".")[0]
    names += [f"{base}.{layer}", layer.partition(".")[2]]
    return next((name for name in names if name in layers), layer)


def reject_vision_layer(layer: str) -> None:
    """Raise if ``layer``, which the engine does not have, belongs to a part that reads images.

    Raises:
        UnsupportedAdapterError: it does.
    """
    if any(part in segment for segment in layer.split(".")[:-1] for part in _VISION_PARTS):
        raise UnsupportedAdapterError(
            f"the adapter changes {layer!r}, which reads images; only the text model's layers are adapted here: train "
            r"with target_modules that name no others, as '.*(language_model|text_model).*\.(q_proj|v_proj)', or merge "
            "the adapter into the model"
        )


@dataclass(frozen=True)
class LayerMatrices:
    """The addition of an adapter to the output of one linear layer: ``b @ (a @ inputs)``.

    Args:
        a: ``[R, K]``, in the model's dtype.
        b: ``[N, R]``, likewise, including the adapter's factor.
    """

    a: Tensor
    b: Tensor


def read_peft_folder(
    folder: Path, layers: Mapping[str, tuple[int, int]], dtype: torch.dtype, max_rank: int
) -> dict[str, LayerMatrices]:
    """Read the adapter in ``folder``; return its matrices by the name of their layer, which is one of ``layers``.

    Args:
        layers: numbers of inputs and outputs of the model's layers that can be adapted, by name.

    Raises:
        AdapterFileError: a file is missing, unreadable or truncated.
        UnsupportedAdapterError: its kind is not supported, or it does not fit the model.
    """
    config = read_peft_config(folder)
    if config.largest_rank > max_rank:
        raise UnsupportedAdapterError(
            f"the adapter has rank {config.largest_rank}, and this engine takes up to {max_rank}; start it with "
            f"--max-lora-rank {config.largest_rank}"
        )
    path = folder / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            pairs = _pair(list(file.keys()))
            engine_names = _names_in_engine(pairs, config, layers)
            return {
                own: _scaled(layer, file.get_tensor(down), file.get_tensor(up), layers[own], config, dtype)
                for own, (layer, (down, up)) in zip(engine_names, pairs.items(), strict=True)
            }
    except (OSError, SafetensorError) as error:
        raise AdapterFileError(f"{path} cannot be read: {error}") from error


def _pair(names: list[str]) -> dict[str, tuple[str, str]]:
    """Return the names of both tensors of each layer."""
    for name in names:
        if not name.endswith((_DOWN, _UP)):
            what = next((what for end, what in _KINDS.items() if name.endswith(end)), "tensors of an unknown kind")
            raise UnsupportedAdapterError(f"tensor {name!r}: the adapter has {what}, which engines do not compute")
    downs = {name.removesuffix(_DOWN) for name in names if name.endswith(_DOWN)}
    ups = {name.removesuffix(_UP) for name in names if name.endswith(_UP)}
    if downs != ups or not downs:
        unpaired = min(downs ^ ups, default="")
        what = f"has one of two matrices of {unpaired!r}" if unpaired else "has no matrices"
        raise UnsupportedAdapterError(f"{WEIGHTS_FILE} {what}; a low-rank layer has lora_A and lora_B")
    return {name.removeprefix(_PREFIX): (name + _DOWN, name + _UP) for name in sorted(downs)}


def _names_in_engine(
    pairs: Mapping[str, tuple[str, str]], config: PeftConfig, layers: Mapping[str, tuple[int, int]]
) -> list[str]:
    """Return the engine's names of the layers of ``pairs``."""
    names = [name_in_engine(layer, layers) for layer in pairs]
    if len(set(names)) < len(names):
        twice = min(name for name in names if names.count(name) > 1)
        raise UnsupportedAdapterError(f"{WEIGHTS_FILE} has matrices of {twice!r} by two names; keep one of them")
    for layer, name in zip(pairs, names, strict=True):
        if name not in layers:
            reject_vision_layer(layer)
            last = sorted({name.rsplit(".", 1)[-1] for name in layers})
            raise UnsupportedAdapterError(
                f"the adapter changes {layer!r}, which is no linear layer of the model that can be adapted; those are "
                f"{', '.join(last)}"
            )
        if not config.names(layer):
            raise UnsupportedAdapterError(f"{WEIGHTS_FILE} has matrices of {layer!r}, and target_modules leave it out")
    if missing := config.missing_among(pairs):
        raise UnsupportedAdapterError(f"target_modules name {missing[0]!r}, and {WEIGHTS_FILE} has nothing for it")
    return names


def _scaled(
    layer: str, a: Tensor, b: Tensor, size: tuple[int, int], config: PeftConfig, dtype: torch.dtype
) -> LayerMatrices:
    (num_inputs, num_outputs), rank = size, config.rank_of(layer)
    if a.shape != (rank, num_inputs) or b.shape != (num_outputs, rank):
        raise UnsupportedAdapterError(
            f"the matrices of {layer!r} are {list(a.shape)} and {list(b.shape)}, and with rank {rank} the model needs "
            f"{[rank, num_inputs]} and {[num_outputs, rank]}; the adapter is of another model"
        )
    matrices = LayerMatrices(_rounded(a, 1.0, dtype), _rounded(b, config.scale_of(layer), dtype))
    if not (bool(matrices.a.isfinite().all()) and bool(matrices.b.isfinite().all())):
        raise UnsupportedAdapterError(f"the matrices of {layer!r} hold an infinity or NaN in {dtype}")
    return matrices


def _rounded(matrix: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    if factor == 1.0:
        return matrix.to(dtype).contiguous()
    return (matrix.double() * factor).to(dtype).contiguous()
