"""Turn an exception of transformers about a model's folder into a sentence with cause and remedy.

Where files and configuration differ, the sentence names the field of config.json that is at fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from .quantized import plain_names
from .wording import few, first_line

_ATTENTION = re.compile(r"attn|attention")
_HEAD_FIELDS = ("num_attention_heads", "num_key_value_heads", "head_dim")

_MAX_LEN = 300
_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def explain(error: Exception, folder: Path, model_config: PretrainedConfig, *, trust_remote_code: bool) -> str:
    """Return why the module of ``model_config`` could not be loaded from ``folder``, which raised ``error``."""
    return (
        (None if trust_remote_code else own_code(folder))
        or _damaged_file(folder)
        or _unknown_value(error, model_config)
        or _incomplete_group(error, folder, model_config, trust_remote_code)
        or first_line(error)
    )


def own_code(folder: Path) -> str | None:
    """Return the remedy for a model that comes with its own code; None if it has none."""
    modules = _read_json(folder / "config.json").get("auto_map")
    if not isinstance(modules, dict) or not modules:
        return None
    files = dict.fromkeys(f"{str(name).rpartition('--')[2].partition('.')[0]}.py" for name in modules.values())
    return (
        f"it needs code of its own ({few(files)}; auto_map in config.json), which runs with all rights of the worker: "
        "read it, and if you trust it start with --trust-remote-code (trust_remote_code=True)"
    )


def _damaged_file(folder: Path) -> str | None:
    """Return which weight file is missing or truncated; None if all can be opened."""
    files = sorted(folder.glob("*.safetensors"))
    for index in (name for name in _INDEX_FILES if (folder / name).is_file()):
        weight_map = _read_json(folder / index).get("weight_map")
        if not isinstance(weight_map, dict):
            return f"{index} has no weight_map; fetch the model again"
        absent = sorted({str(name) for name in weight_map.values() if not (folder / str(name)).is_file()})
        if absent:
            return f"{index} names {few(absent)}, which the folder lacks; fetch the model again"
    for path in files:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            return f"{path.name} is damaged or cut short ({first_line(error)}); fetch it again"
    return None


def _unknown_value(error: Exception, model_config: PretrainedConfig) -> str | None:
    """Return which field of the configuration has a value that transformers failed to look up; None if none has."""
    if not isinstance(error, KeyError) or not error.args:
        return None
    value = error.args[0]
    fields = dict.fromkeys(name for name, field_value in _fields(model_config.to_dict()) if field_value == value)
    if not isinstance(value, str) or not fields:
        return None
    return (
        f"config.json's {few(fields)} is {value[:_MAX_LEN]!r}, which transformers {transformers.__version__} does not "
        "know: correct it, or install a newer transformers"
    )


def _fields(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _fields(value)
        else:
            yield name, value


def _incomplete_group(
    error: Exception, folder: Path, model_config: PretrainedConfig, trust_remote_code: bool
) -> str | None:
    """Return the missing tensors of a group that transformers joins, such as experts; None if that is not the cause."""
    if "conversion" not in str(error):
        return None
    try:
        present = plain_names(folder, model_config)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(model_config, trust_remote_code=trust_remote_code)
        expected = revert_weight_conversion(module, module.state_dict()).keys()
    except Exception:  # it fails as before; the first error says more
        return None
    missing = sorted(expected - present - (module.all_tied_weights_keys or {}).keys())
    if not present or not missing:
        return None
    return f"none of its files has {few(missing)}, to be joined with others; fetch the model again"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class ShapeMismatch(NamedTuple):
    """A tensor with the shape ``actual`` in the files, where ``expected`` follows from config.json."""

    name: str
    actual: tuple[int, ...]
    expected: tuple[int, ...]


def wrong_layers(module: PreTrainedModel, missing: list[str], unexpected: list[str]) -> list[str]:
    """Return a sentence if config.json has more or fewer layers than the files."""
    layers = _layers(module)
    if layers is None:
        return []
    prefix, num_layers = layers
    present = _layer_numbers(prefix, set(module.state_dict()) - set(missing))
    absent = sorted(_layer_numbers(prefix, missing) - present)
    # A file without a head may lack the prefix.
    short = prefix.removeprefix(f"{module.base_model_prefix}.")
    beyond = sorted(
        n for n in _layer_numbers(prefix, unexpected) | _layer_numbers(short, unexpected) if n >= num_layers
    )
    fact = f"num_hidden_layers is {num_layers} in config.json"
    sentences = [f"{fact}, and the files lack the whole of layers {few(map(str, absent))}"] if absent else []
    return sentences + ([f"{fact}, and the files have layers {few(map(str, beyond))} as well"] if beyond else [])


def wrong_sizes(module: PreTrainedModel, mismatches: list[ShapeMismatch]) -> list[str]:
    """Return which sizes of config.json differ from those of the files, as far as shapes show it."""
    config = module.config.get_text_config()
    embedding = module.get_input_embeddings()
    embedding_names = {name for name, part in module.named_modules(remove_duplicate=False) if part is embedding}
    blamed: dict[str, None] = {}
    for mismatch in mismatches:
        if mismatch.name.rpartition(".")[0] in embedding_names and len(mismatch.actual) == len(mismatch.expected) == 2:
            fields = [(field, i) for i, field in enumerate(("vocab_size", "hidden_size"))]
            blamed |= {
                _size_text(config, f, mismatch.actual[i]): None
                for f, i in fields
                if mismatch.actual[i] != mismatch.expected[i]
            }
    if not blamed:
        for mismatch in mismatches:
            blamed |= dict.fromkeys(_sizes_of(config, mismatch))
    return list(blamed)


def _sizes_of(config: PretrainedConfig, mismatch: ShapeMismatch) -> list[str]:
    """Return the fields that determine the size which ``mismatch`` contradicts; for attention, all of its fields."""
    if _ATTENTION.search(mismatch.name):
        heads = [f"{field} is {value}" for field in _HEAD_FIELDS if (value := getattr(config, field, None)) is not None]
        return [f"{', '.join(heads)} in config.json, which the files' attention contradicts"] if heads else []
    pairs = [pair for pair in zip(mismatch.actual, mismatch.expected, strict=False) if pair[0] != pair[1]]
    fields = [(name, value) for name, value in vars(config).items() if type(value) is int]
    return [
        _size_text(config, name, actual) for actual, expected in pairs for name, value in fields if value == expected
    ]


def _size_text(config: PretrainedConfig, field: str, actual: int) -> str:
    return f"{field} is {getattr(config, field, 'not given')} in config.json, and {actual} in the files"


def _layers(module: PreTrainedModel) -> tuple[str, int] | None:
    """Return the name of the list of layers, with a dot, and its length; None if none is as long as config.json
    says.
    """
    lists = [(f"{name}.", len(part)) for name, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    number = getattr(module.config.get_text_config(), "num_hidden_layers", None)
    return next(((name, length) for name, length in lists if length == number), None)


def _layer_numbers(prefix: str, names: set[str] | list[str]) -> set[int]:
    parts = (name[len(prefix) :].partition(".")[0] for name in names if name.startswith(prefix))
    return {int(part) for part in parts if part.isdecimal()}
