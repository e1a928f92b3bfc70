"""``adapter_config.json`` as PEFT writes it: which layers an adapter changes, with which ranks and factors.

The one reader, for whoever gives an adapter a name and for the engine that loads it, so that both refuse the same.
An unsupported setting is refused by its name, because an adapter that was half applied would give wrong answers.
Whether the weights fit the model is seen by the engine.

Source: peft 0.21, ``LoraConfig``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..errors import AdapterFileError, UnsupportedAdapterError
from ..params.lora import CONFIG_FILE
from ..values.shown import shown

T = TypeVar("T")

_MERGE = "merge the adapter into the model"
# Fields that change the computation, with the values that change nothing, and the remedy. None is off.
_NOT_SERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((False,), f"DoRA is not computed; train with use_dora=False, or {_MERGE}"),
    "use_qalora": ((False,), f"QA-LoRA is not computed; {_MERGE}"),
    "use_bdlora": ((False, {}), f"matrices in blocks (BD-LoRA) are not computed; {_MERGE}"),
    "kasa_config": ((), f"it truncates the weights of the base model, too (KaSA); {_MERGE}"),
    "monteclora_config": ((), f"mixtures of sampled matrices (MonteCLoRA) are not computed; {_MERGE}"),
    "arrow_config": (({},), "there is no router between adapters (Arrow); name one adapter in each request"),
    "bias": (("none",), "biases are not adapted; train with bias='none'"),
    "lora_bias": ((False,), "adapters have no biases; train with lora_bias=False"),
    "modules_to_save": (([],), f"whole modules are not replaced; {_MERGE}"),
    "target_parameters": (([],), "parameters of experts are not adapted; name linear layers in target_modules"),
    "trainable_token_indices": (([], {}), f"embeddings are not adapted; {_MERGE}"),
    "layer_replication": (([],), f"layers are not replicated; {_MERGE}"),
    "alora_invocation_tokens": (([],), "activated LoRA is not computed"),
    "fan_in_fan_out": ((False,), "weights are laid out as torch's linear layers have them"),
    # Others change the weights of the base model before they train, and would have to change them here.
    "init_lora_weights": (
        (True, False, "gaussian", "eva", "orthogonal", "loftq"),
        "it changes the weights of the base model, too; convert the adapter to a plain one "
        "(path_initial_model_for_weight_conversion of PEFT's save_pretrained)",
    ),
}
_EMBEDDINGS = frozenset({"embed_tokens", "wte", "word_embeddings", "lm_head"})
_ALL_LINEAR = "all-linear"


class PeftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an adapter before its weights are read.

    Args:
        rank, alpha: values for layers without a pattern.
        targets: endings of the names of layers, or an expression that whole names match; "all-linear" is any.
        is_rank_stabilized: the factor is alpha by the root of the rank (rsLoRA).
        rank_pattern, alpha_pattern: by expression, for layers whose names end so; the first that matches counts.
        base_model_name: name of the model it was trained for; "" if unknown.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | str
    is_rank_stabilized: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    base_model_name: str = ""

    @property
    def largest_rank(self) -> int:
        """Largest rank of any layer."""
        return max(self.rank, *self.rank_pattern.values(), 0)

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Names of the layers that it adapts; an expression is the only one, as it was written."""
        return (self.targets,) if isinstance(self.targets, str) else tuple(sorted(self.targets))

    def rank_of(self, layer: str) -> int:
        """Return the rank at the layer of this name."""
        return _by_pattern(self.rank_pattern, layer, self.rank)

    def scale_of(self, layer: str) -> float:
        """Return the factor of the product of its matrices."""
        alpha, rank = _by_pattern(self.alpha_pattern, layer, self.alpha), self.rank_of(layer)
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank

    def names(self, layer: str) -> bool:
        """Whether the layer of that name is one of its targets."""
        if isinstance(self.targets, str):
            return self.targets == _ALL_LINEAR or re.fullmatch(self.targets, layer) is not None
        return any(_ends_with(layer, target) for target in self.targets)

    def missing_among(self, layers: Iterable[str]) -> list[str]:
        """Return targets that no name of ``layers`` ends with."""
        names = list(layers)
        targets = () if isinstance(self.targets, str) else self.targets
        return [target for target in targets if not any(_ends_with(layer, target) for layer in names)]


def read_peft_config(folder: str | Path) -> PeftConfig:
    """Return the configuration in a folder.

    Raises:
        AdapterFileError: it cannot be read, or is no JSON object.
        UnsupportedAdapterError: a field makes no sense, or no engine here computes such an adapter; names the field
            and a remedy.
    """
    path = Path(folder) / CONFIG_FILE
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise AdapterFileError(
            f"{path} cannot be read ({error.strerror}); name a folder that PEFT's save_pretrained wrote"
        ) from error
    except ValueError as error:
        raise AdapterFileError(f"{path} is not JSON: {error}") from error
    except RecursionError:
        raise AdapterFileError(f"{path} is nested too deep; PEFT's save_pretrained writes one flat object") from None
    if not isinstance(fields, dict):
        raise AdapterFileError(f"{path} must hold a JSON object, got {shown(fields)}")
    _check_kind(fields, path)
    base = fields.get("base_model_name_or_path")
    return PeftConfig(
        rank=_rank("r", fields.get("r"), path),
        alpha=_alpha("lora_alpha", fields.get("lora_alpha"), path),
        targets=_targets(fields.get("target_modules"), path),
        is_rank_stabilized=bool(fields.get("use_rslora")),
        rank_pattern=_pattern("rank_pattern", fields, _rank, path),
        alpha_pattern=_pattern("alpha_pattern", fields, _alpha, path),
        base_model_name=base if isinstance(base, str) else "",
    )


def _check_kind(said: dict[str, Any], path: Path) -> None:
    kind = said.get("peft_type")
    if kind != "LORA":
        raise UnsupportedAdapterError(f"peft_type of {path} must be 'LORA', got {shown(kind)}")
    for name, (neutral, remedy) in _NOT_SERVED.items():
        value = said.get(name)
        if value is not None and value not in neutral:
            raise UnsupportedAdapterError(f"{name}={shown(value)} of {path} is not served: {remedy}")


def _targets(given: object, path: Path) -> tuple[str, ...] | str:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise UnsupportedAdapterError(
            f"target_modules of {path} must be names of layers or one expression, got {shown(given)}"
        )
    for name in names:
        if name.rpartition(".")[2] in _EMBEDDINGS:
            raise UnsupportedAdapterError(
                f"target_modules of {path} has {shown(name)}: embeddings and the output layer are not adapted; train "
                "with the linear layers of attention and MLP alone"
            )
    return _expression("target_modules", given, path) if isinstance(given, str) else tuple(names)


def _rank(name: str, value: object, path: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedAdapterError(f"{name} of {path} must be an integer of at least 1, got {shown(value)}")
    return value


def _alpha(name: str, value: object, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnsupportedAdapterError(f"{name} of {path} must be a finite number, got {shown(value)}")
    return float(value)


def _pattern(name: str, said: dict[str, Any], read: Callable[[str, object, Path], T], path: Path) -> dict[str, T]:
    pattern = said.get(name) or {}
    if not isinstance(pattern, dict):
        raise UnsupportedAdapterError(f"{name} of {path} must be an object, got {shown(pattern)}")
    return {_expression(name, key, path): read(f"{name}[{shown(key)}]", value, path) for key, value in pattern.items()}


def _expression(name: str, text: str, path: Path) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise UnsupportedAdapterError(
            f"{name} of {path} has {shown(text)}, which is no regular expression: {error}"
        ) from error
    return text


def _ends_with(layer: str, target: str) -> bool:
    return layer == target or layer.endswith(f".{target}")


def _by_pattern(pattern: dict[str, T], layer: str, default: T) -> T:
    matching = (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", layer))
    return next(matching, default)
