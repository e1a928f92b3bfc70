"""What PEFT says of an adapter in ``adapter_config.json``, and what of it no engine here computes.

Source: peft 0.21, ``LoraConfig``. Whether the weights fit is seen by the engine that loads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from ..adapter_errors import AdapterFileError, UnsupportedAdapterError
from ..adapters import CONFIG_FILE
from ..shown import shown

# Fields that change what is computed, with the values that change nothing, and what to do without.
_NOT_SERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((None, False), "DoRA is not computed; train with use_dora=False, or merge the adapter into the model"),
    "use_qalora": ((None, False), "QA-LoRA is not computed; merge the adapter into the model"),
    "bias": ((None, "none"), "biases are not adapted; train with bias='none'"),
    "lora_bias": ((None, False), "adapters have no biases; train with lora_bias=False"),
    "modules_to_save": ((None, []), "whole modules are not replaced; merge the adapter into the model"),
    "target_parameters": ((None, []), "parameters of experts are not adapted; name linear layers in target_modules"),
    "trainable_token_indices": ((None, [], {}), "embeddings are not adapted; merge the adapter into the model"),
    "layer_replication": ((None, []), "layers are not replicated; merge the adapter into the model"),
    "alora_invocation_tokens": ((None, []), "activated LoRA is not computed"),
    "fan_in_fan_out": ((None, False), "weights are laid out as torch's linear layers have them"),
}
_EMBEDDINGS = frozenset({"embed_tokens", "wte", "word_embeddings", "lm_head"})


class PeftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be known of an adapter before its weights are read.

    Args:
        rank: the largest of any layer.
        target_modules: names of the layers that it adapts; a pattern is the only one, as it was written.
        base_model_name: what it was trained for, as its trainer called it; "" if it does not say.
    """

    rank: int
    target_modules: tuple[str, ...]
    base_model_name: str = ""


def read_peft_config(folder: str | Path) -> PeftConfig:
    """Return what the configuration in a folder says.

    Raises:
        AdapterFileError: it cannot be read, is no JSON object, or has a field that makes no sense.
        UnsupportedAdapterError: no engine here computes such an adapter; names the field and a remedy.
    """
    path = Path(folder) / CONFIG_FILE
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise AdapterFileError(
            f"{path} cannot be read ({error.strerror}); name a folder that PEFT's save_pretrained wrote"
        ) from error
    except ValueError as error:
        raise AdapterFileError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterFileError(f"{path} must hold a JSON object, got {shown(config)}")
    _check_kind(config, path)
    base = config.get("base_model_name_or_path")
    return PeftConfig(
        rank=_rank(config, path),
        target_modules=_target_modules(config, path),
        base_model_name=base if isinstance(base, str) else "",
    )


def _check_kind(config: dict[str, Any], path: Path) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedAdapterError(f"peft_type of {path} must be 'LORA', got {shown(kind)}")
    for name, (neutral, remedy) in _NOT_SERVED.items():
        value = config.get(name)
        if value not in neutral:
            raise UnsupportedAdapterError(f"{name}={shown(value)} of {path} is not served: {remedy}")


def _rank(config: dict[str, Any], path: Path) -> int:
    pattern = config.get("rank_pattern") or {}
    if not isinstance(pattern, dict):
        raise AdapterFileError(f"rank_pattern of {path} must be an object, got {shown(pattern)}")
    for name, rank in (("r", config.get("r")), *((f"rank_pattern[{shown(key)}]", at) for key, at in pattern.items())):
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise AdapterFileError(f"{name} of {path} must be an integer of at least 1, got {shown(rank)}")
    return max(config["r"], *pattern.values()) if pattern else config["r"]


def _target_modules(config: dict[str, Any], path: Path) -> tuple[str, ...]:
    given = config.get("target_modules")
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise AdapterFileError(f"target_modules of {path} must be names of layers, got {shown(given)}")
    for name in names:
        if name.rpartition(".")[2] in _EMBEDDINGS:
            raise UnsupportedAdapterError(
                f"target_modules of {path} has {shown(name)}: embeddings and the output layer are not adapted; train "
                "with the linear layers of attention and MLP alone"
            )
    return tuple(sorted(names))
