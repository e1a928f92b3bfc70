"""``adapter_config.json`` as PEFT writes it: which layers an adapter changes, with which ranks and factors.

What is not computed here is refused by its name. An adapter that was half applied would answer, and wrongly.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....shared.adapter_errors import AdapterFileError, UnsupportedAdapterError
from ....shared.adapters import CONFIG_FILE
from ....shared.shown import shown

# A field, what it is when it is off, and what an adapter with it is.
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("use_dora", (False,), "DoRA, which scales the columns of merged weights"),
    ("bias", ("none",), "biases of its own"),
    ("lora_bias", (False,), "biases of its own"),
    ("modules_to_save", ((), []), "layers that it replaces as a whole"),
    ("trainable_token_indices", ((), [], {}), "embeddings of its own"),
    ("target_parameters", ((), []), "experts, or other parameters that are no linear layers"),
    ("layer_replication", ((), []), "layers that it repeats"),
    ("alora_invocation_tokens", ((), []), "tokens that switch it on (aLoRA)"),
    ("use_qalora", (False,), "QALoRA"),
    ("use_bdlora", (False, {}), "matrices in blocks (BD-LoRA)"),
    ("arrow_config", ({},), "a router between adapters (Arrow)"),
    ("fan_in_fan_out", (False,), "layers whose weights are transposed (Conv1D)"),
)
# Others change the weights of the base model before they train, and would have to change them here.
_STARTS = (True, False, "gaussian", "eva", "orthogonal", "loftq")
_ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class PeftConfig:
    """What is needed of it.

    Args:
        targets: endings of the names of layers, or a regular expression that whole names match; "all-linear" is any.
        rank_pattern, alpha_pattern: by expression, for layers whose names end so; the first that matches counts.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | str
    is_rank_stabilized: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)

    def rank_of(self, layer: str) -> int:
        """The rank at the layer of that name."""
        return _by_pattern(self.rank_pattern, layer, self.rank)

    def scale_of(self, layer: str) -> float:
        """What the product of its matrices is multiplied by."""
        alpha, rank = _by_pattern(self.alpha_pattern, layer, self.alpha), self.rank_of(layer)
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank

    def names(self, layer: str) -> bool:
        """Whether the layer of that name is one of its targets."""
        if isinstance(self.targets, str):
            return self.targets == _ALL_LINEAR or re.fullmatch(self.targets, layer) is not None
        return any(_ends_with(layer, target) for target in self.targets)

    def missing_among(self, layers: Iterable[str]) -> list[str]:
        """Targets that no name of ``layers`` ends with."""
        known = list(layers)
        targets = () if isinstance(self.targets, str) else self.targets
        return [target for target in targets if not any(_ends_with(layer, target) for layer in known)]


def read_peft_config(folder: Path, max_rank: int) -> PeftConfig:
    """Read the configuration in ``folder``.

    Raises:
        AdapterFileError: there is none, or it is no JSON object.
        UnsupportedAdapterError: it says what is not computed here, or has a rank above ``max_rank``.
    """
    path = folder / CONFIG_FILE
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise AdapterFileError(f"{path} cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise AdapterFileError(f"{path} must be a JSON object, got {shown(said)}")
    _check_kind(said)
    config = PeftConfig(
        rank=_whole(said, "r"),
        alpha=_number(said, "lora_alpha"),
        targets=_targets(said.get("target_modules")),
        is_rank_stabilized=bool(said.get("use_rslora")),
        rank_pattern={key: _whole(_dict(said, "rank_pattern"), key) for key in _dict(said, "rank_pattern")},
        alpha_pattern={key: _number(_dict(said, "alpha_pattern"), key) for key in _dict(said, "alpha_pattern")},
    )
    largest = max(config.rank, *config.rank_pattern.values(), 0)
    if largest > max_rank:
        raise UnsupportedAdapterError(
            f"the adapter has rank {largest}, and this engine takes up to {max_rank}; start it with --max-lora-rank "
            f"{largest}"
        )
    return config


def _check_kind(said: dict[str, Any]) -> None:
    kind = said.get("peft_type")
    if kind != "LORA":
        raise UnsupportedAdapterError(f"peft_type is {shown(kind)}, and engines compute adapters of type 'LORA' alone")
    for name, off, what in _REFUSED:
        value = said.get(name)
        if value is not None and value not in off:
            raise UnsupportedAdapterError(
                f"{name} is {shown(value)}: the adapter has {what}, which engines do not compute; merge it into the "
                f"model instead"
            )
    start = said.get("init_lora_weights", True)
    if start is not None and start not in _STARTS:
        raise UnsupportedAdapterError(
            f"init_lora_weights is {shown(start)}, which changes the weights of the base model, too; convert the "
            f"adapter to a plain one (path_initial_model_for_weight_conversion of PEFT's save_pretrained)"
        )


def _targets(said: object) -> tuple[str, ...] | str:
    if isinstance(said, str) and said:
        try:
            re.compile(said)
        except re.error as error:
            raise UnsupportedAdapterError(f"target_modules is {shown(said)}, no regular expression: {error}") from error
        return said
    if isinstance(said, list) and said and all(isinstance(name, str) for name in said):
        return tuple(said)
    raise UnsupportedAdapterError(f"target_modules must be names of layers or one expression, got {shown(said)}")


def _whole(said: dict[str, Any], name: str) -> int:
    value = said.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedAdapterError(f"{name} must be a rank, an integer of at least 1, got {shown(value)}")
    return value


def _number(said: dict[str, Any], name: str) -> float:
    value = said.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnsupportedAdapterError(f"{name} must be a finite number, got {shown(value)}")
    return float(value)


def _dict(said: dict[str, Any], name: str) -> dict[str, Any]:
    value = said.get(name) or {}
    if not isinstance(value, dict):
        raise UnsupportedAdapterError(f"{name} must be a JSON object, got {shown(value)}")
    return value


def _ends_with(layer: str, target: str) -> bool:
    return layer == target or layer.endswith(f".{target}")


def _by_pattern(pattern: dict[str, Any], layer: str, default: Any) -> Any:
    for key, value in pattern.items():
        try:
            if re.match(rf"(.*\.)?({key})$", layer):
                return value
        except re.error as error:
            raise UnsupportedAdapterError(f"{shown(key)} of a pattern is no regular expression: {error}") from error
    return default
