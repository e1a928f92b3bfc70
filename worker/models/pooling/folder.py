"""The pooling settings of a model folder: whether its model pools, and sentence-transformers' own files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import Tensor, nn

from ....shared.errors import ModelLoadError
from ..formats.declared import declares_pooling

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CLS, LAST, MEAN = "cls", "last", "mean"
# By the names of sentence-transformers: older ones (one switch each) and newer ones (values of one field).
_MODES = {
    "pooling_mode_cls_token": CLS,
    "pooling_mode_lasttoken": LAST,
    "pooling_mode_mean_tokens": MEAN,
    "cls": CLS,
    "lasttoken": LAST,
    "mean": MEAN,
}
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "Tanh": nn.Tanh,
    "Identity": nn.Identity,
    "Sigmoid": nn.Sigmoid,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
}


@dataclass(frozen=True)
class PoolingFolder:
    """The settings of a folder.

    Args:
        mode: how the tokens of a text become one vector; None if it follows from the model's kind.
        normalize: embeddings have length one.
        dense: layers after pooling.
        max_length: most tokens of a text.
        prompts, default_prompt_name: as in ``PoolingSetup``.
    """

    mode: str | None = None
    normalize: bool = True
    dense: tuple[nn.Module, ...] = ()
    max_length: int | None = None
    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None

    @classmethod
    def read(cls, folder: Path) -> PoolingFolder:
        """Read ``modules.json`` and the files it names; without it use vLLM's defaults.

        Raises:
            ModelLoadError: a file cannot be read, or a module is unknown.
        """
        modules = _read_json(folder / "modules.json")
        if modules is None:
            return cls()
        mode, normalize, dense = None, False, []
        for module in modules:
            kind, place = str(module["type"]).rpartition(".")[2], folder / module["path"]
            if kind == "Pooling":
                mode = _mode_of(_read_json(place / "config.json") or {}, place)
            elif kind == "Normalize":
                normalize = True
            elif kind == "Dense":
                dense.append(_read_dense(place))
            elif kind != "Transformer":
                raise ModelLoadError(
                    f"{folder / 'modules.json'} names a module {kind}; known are Transformer, Pooling, Dense, Normalize"
                )
        lengths = _read_json(folder / "sentence_bert_config.json") or {}
        return cls(mode, normalize, tuple(dense), lengths.get("max_seq_length"), *read_prompts(folder))


def read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Return ``prompts`` and ``default_prompt_name`` of a folder of sentence-transformers."""
    config = _read_json(folder / "config_sentence_transformers.json") or {}
    prompts = {name: text for name, text in (config.get("prompts") or {}).items() if text}
    return prompts, config.get("default_prompt_name")


def pools(folder: Path, model_config: PretrainedConfig, runner: str) -> bool:
    """Whether the model in ``folder`` pools: by ``runner``, and for "auto" by the architecture it was saved as."""
    if runner != "auto":
        return runner == "pooling"
    return declares_pooling(folder, (model_config.architectures or [""])[0])


def _mode_of(config: dict[str, Any], place: Path) -> str:
    declared = config.get("pooling_mode")
    chosen = (
        [declared]
        if declared
        else [name for name, value in config.items() if name.startswith("pooling_") and value is True]
    )
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise ModelLoadError(f"{place / 'config.json'} asks for {chosen}; served is one of cls, lasttoken, mean")
    return _MODES[chosen[0]]


def _read_dense(place: Path) -> nn.Module:
    config = _read_json(place / "config.json") or {}
    name = str(config.get("activation_function", "Identity")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ModelLoadError(
            f"{place / 'config.json'} asks for the activation {name}; known: {', '.join(_ACTIVATIONS)}"
        )
    try:
        tensors: dict[str, Tensor] = load_file(place / "model.safetensors")
        linear = nn.Linear(config["in_features"], config["out_features"], bias="linear.bias" in tensors)
        linear.load_state_dict({key.removeprefix("linear."): tensor.float() for key, tensor in tensors.items()})
    except (OSError, KeyError, RuntimeError) as error:
        raise ModelLoadError(f"the dense layer in {place} cannot be read: {error}") from error
    return nn.Sequential(linear, _ACTIVATIONS[name]()).eval().requires_grad_(requires_grad=False)


def class_activation(model_config: PretrainedConfig, num_labels: int) -> nn.Module:
    """Return the function from logits to probabilities, by the files of a cross-encoder, else by the kind of
    training.
    """
    settings = getattr(model_config, "sentence_transformers", None) or {}
    declared = settings.get("activation_fn") or getattr(model_config, "sbert_ce_default_activation_function", None)
    kind = _ACTIVATIONS.get(str(declared).rpartition(".")[2])
    if kind is not None:
        return kind()
    problem = getattr(model_config, "problem_type", None)
    if problem == "regression":
        return nn.Identity()
    return nn.Sigmoid() if problem == "multi_label_classification" or num_labels == 1 else nn.Softmax(-1)


def labels_of(model_config: PretrainedConfig, num_labels: int) -> tuple[str, ...]:
    """Return the names of the classes in order."""
    names = {int(key): str(name) for key, name in (getattr(model_config, "id2label", None) or {}).items()}
    return tuple(names.get(index, f"LABEL_{index}") for index in range(num_labels))


def matryoshka_of(model_config: PretrainedConfig) -> tuple[int, ...] | None:
    """Return the dimensions to which an embedding may be cut, by the configuration; None if it names none."""
    dimensions = getattr(model_config, "matryoshka_dimensions", None)
    return tuple(int(size) for size in dimensions) if dimensions else None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}; fetch the model again") from error
