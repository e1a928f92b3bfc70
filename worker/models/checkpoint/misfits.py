"""Finds the field of config.json that is at fault where a model's files and its configuration differ."""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .errors import few

_ATTENTION = re.compile(r"attn|attention")
_HEAD_FIELDS = ("num_attention_heads", "num_key_value_heads", "head_dim")


class Misfit(NamedTuple):
    """A tensor of the shape ``found`` in the files, where ``wanted`` follows from config.json."""

    name: str
    found: tuple[int, ...]
    wanted: tuple[int, ...]


def wrong_layers(module: PreTrainedModel, missing: list[str], unexpected: list[str]) -> list[str]:
    """Say that config.json has more or fewer layers than the files, if that is it."""
    layers = _layers(module)
    if layers is None:
        return []
    prefix, num_layers = layers
    present = _layer_numbers(prefix, set(module.state_dict()) - set(missing))
    absent = sorted(_layer_numbers(prefix, missing) - present)
    # The prefix is one that a file without a head may lack.
    short = prefix.removeprefix(f"{module.base_model_prefix}.")
    beyond = sorted(
        n for n in _layer_numbers(prefix, unexpected) | _layer_numbers(short, unexpected) if n >= num_layers
    )
    said = f"num_hidden_layers is {num_layers} in config.json"
    told = [f"{said}, and the files lack the whole of layers {few(map(str, absent))}"] if absent else []
    return told + ([f"{said}, and the files have layers {few(map(str, beyond))} as well"] if beyond else [])


def wrong_sizes(module: PreTrainedModel, misfits: list[Misfit]) -> list[str]:
    """Say which sizes of config.json are not those of the files, as far as shapes tell."""
    config = module.config.get_text_config()
    embedding = module.get_input_embeddings()
    of_embedding = {name for name, part in module.named_modules(remove_duplicate=False) if part is embedding}
    blamed: dict[str, None] = {}
    for misfit in misfits:
        if misfit.name.rpartition(".")[0] in of_embedding and len(misfit.found) == len(misfit.wanted) == 2:
            fields = [(field, i) for i, field in enumerate(("vocab_size", "hidden_size"))]
            blamed |= {
                _said(config, f, misfit.found[i]): None for f, i in fields if misfit.found[i] != misfit.wanted[i]
            }
    if not blamed:
        for misfit in misfits:
            blamed |= dict.fromkeys(_sizes_of(config, misfit))
    return list(blamed)


def _sizes_of(config: PretrainedConfig, misfit: Misfit) -> list[str]:
    """Fields that say the size which ``misfit`` does not have; of attention all that its sizes follow from."""
    if _ATTENTION.search(misfit.name):
        heads = [f"{field} is {value}" for field in _HEAD_FIELDS if (value := getattr(config, field, None)) is not None]
        return [f"{', '.join(heads)} in config.json, which the files' attention contradicts"] if heads else []
    pairs = [pair for pair in zip(misfit.found, misfit.wanted, strict=False) if pair[0] != pair[1]]
    fields = [(name, value) for name, value in vars(config).items() if type(value) is int]
    return [_said(config, name, found) for found, wanted in pairs for name, value in fields if value == wanted]


def _said(config: PretrainedConfig, field: str, found: int) -> str:
    return f"{field} is {getattr(config, field, 'not given')} in config.json, and {found} in the files"


def _layers(module: PreTrainedModel) -> tuple[str, int] | None:
    """The name of the list of layers, with a dot, and its length; None if none is as long as config.json says."""
    lists = [(f"{name}.", len(part)) for name, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    number = getattr(module.config.get_text_config(), "num_hidden_layers", None)
    return next(((name, length) for name, length in lists if length == number), None)


def _layer_numbers(prefix: str, names: set[str] | list[str]) -> set[int]:
    parts = (name[len(prefix) :].partition(".")[0] for name in names if name.startswith(prefix))
    return {int(part) for part in parts if part.isdecimal()}
