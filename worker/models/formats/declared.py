"""Declarations of a model's folder: its quantization, of which unsupported kinds are rejected by name, and its task.

Needs no torch, so that a worker rejects a model before it has loaded anything, and before a download.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....shared.errors import ModelLoadError
from ....shared.values.shown import shown

CONFIG_FILE = "config.json"
SUFFIX = ".gguf"
# Fields of config.json, and of its part for the text model.
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
# Files to read if config.json has no such field: older ones of GPTQ and AWQ, and the method that each implies.
_OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_MODELOPT_FILE = "hf_quant_config.json"
# All files besides config.json that may declare it.
COMPANION_FILES = (*_OLDER_FILES, _MODELOPT_FILE)
_OLDER_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}

# Methods whose weights are integers with scales.
_INTEGER_METHODS = ("gguf", "gptq", "awq", "compressed-tensors")
READ = "fp8 (also of fbgemm and modelopt), mxfp8, mxfp4, compressed-tensors, gptq and awq checkpoints, and .gguf files"
_REMEDY = (
    f"Penstock reads {READ}: fetch the model in one of these, or as it was before quantisation, for which there is "
    "--quantization int8"
)
_POOLING_ARCHITECTURES = ("ForSequenceClassification", "ForTokenClassification", "Model", "ForMaskedLM")
_GENERATING_ARCHITECTURE = "LMHeadModel"
# Usual names of a quant_method, if they differ from it.
_CALLED = {
    "bitsandbytes": "bitsandbytes",
    "bitsandbytes_4bit": "bitsandbytes",
    "bitsandbytes_8bit": "bitsandbytes",
    "eetq": "EETQ",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "exl2": "ExLlamaV2 (exl2)",
    "exl3": "ExLlamaV3 (exl3)",
    "auto-round": "AutoRound",
    "intel/auto-round": "AutoRound",
    "quip": "QuIP#",
    "spqr": "SpQR",
    "vptq": "VPTQ",
    "higgs": "HIGGS",
    "bitnet": "BitNet",
    "fp_quant": "FP-Quant",
}
_COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
    "mxfp8-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
)


@dataclass(frozen=True)
class Quantization:
    """A declared quantization.

    Args:
        method: ``quant_method``; a key of ``reading.READERS``.
        settings: all settings of the configuration about it.
        source: the file that contains them.
    """

    method: str
    settings: dict[str, Any]
    source: str


def declares_pooling(folder: Path, architecture: str) -> bool:
    """Whether the model in ``folder`` pools: by sentence-transformers' file, or the architecture it was saved as."""
    if (folder / "modules.json").is_file():
        return True
    return architecture.endswith(_POOLING_ARCHITECTURES) and not architecture.endswith(_GENERATING_ARCHITECTURE)


def declared_quantization(folder: Path) -> Quantization | None:
    """Return the quantization of the model in ``folder``; None if its weights are plain numbers.

    Raises:
        ModelLoadError: it is not supported; the message names it, and the remedy.
    """
    declaration = _find(folder)
    if declaration is None:
        return None
    settings, source = declaration
    method = str(settings.get("quant_method") or "nothing").lower().replace("_", "-")
    method = _ALIASES.get(method, method)
    check = _CHECKS.get(method)
    if check is None:
        raw = str(settings.get("quant_method"))
        raise ModelLoadError(
            f"the model in {folder} is quantised by {_CALLED.get(raw.lower(), shown(raw))} (quant_method "
            f"{shown(raw)} in {source}), which is not read here. {_REMEDY}"
        )
    unread = check(settings)
    if unread is not None:
        field, supported = unread
        raise ModelLoadError(
            f"the model in {folder} is quantised by {method} with {field} {shown(settings.get(field))} (in {source}), "
            f"which is not read here, but {supported}. {_REMEDY}"
        )
    return Quantization(method, settings, source)


def has_integers(model: Path) -> bool:
    """Return whether a model, a folder or a file, may have weights whose integers our kernels use as they are."""
    declared = declared_quantization(model)
    return model.suffix == SUFFIX or (declared is not None and declared.method in _INTEGER_METHODS)


def _find(folder: Path) -> tuple[dict[str, Any], str] | None:
    config = _read_json(folder / CONFIG_FILE)
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for field in QUANTIZATION_FIELDS:
            if isinstance(part.get(field), dict) and part[field]:
                return _with_method(part[field]), CONFIG_FILE
            if part.get(field) and not isinstance(part[field], dict):
                raise ModelLoadError(
                    f"{folder / 'config.json'} has {field} {shown(part[field])}, which is no object of settings; "
                    "correct it, or fetch the model again"
                )
    modelopt = _read_json(folder / _MODELOPT_FILE).get("quantization")
    if isinstance(modelopt, dict) and modelopt.get("quant_algo"):
        return {**modelopt, "quant_method": "modelopt"}, _MODELOPT_FILE
    for file, method in _OLDER_FILES.items():
        settings = _read_json(folder / file)
        if settings:
            renamed = {_OLDER_NAMES.get(name, name): value for name, value in settings.items()}
            return {"quant_method": method, **renamed}, file
    return None


def _with_method(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with a method. Early bitsandbytes and compressed-tensors leave it out."""
    if settings.get("quant_method"):
        return settings
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return {**settings, "quant_method": "bitsandbytes"}
    return {**settings, "quant_method": "compressed-tensors"} if "config_groups" in settings else settings


Unread = tuple[str, str] | None


def _one_of(settings: dict[str, Any], field: str, default: Any, *read: Any) -> Unread:
    value = settings.get(field, default)
    value = value.lower() if isinstance(value, str) else value
    return None if value in read else (field, " or ".join(str(each) for each in read))


def _check_fp8(settings: dict[str, Any]) -> Unread:
    block = settings.get("weight_block_size")
    is_size = isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)
    return None if not block or is_size else ("weight_block_size", "two whole numbers, 1 or more, or none")


def _check_gptq(settings: dict[str, Any]) -> Unread:
    # Files of AutoGPTQ from before the field checkpoint_format use a flag for the other layout.
    if settings.get("is_marlin_format"):
        return "is_marlin_format", "the ordinary format"
    return (
        _one_of(settings, "bits", None, 2, 4, 8)
        or _one_of(settings, "checkpoint_format", "gptq", "gptq", "gptq_v2")
        or _one_of(settings, "pack_dtype", "int32", "int32")
    )


def _check_awq(settings: dict[str, Any]) -> Unread:
    return _one_of(settings, "bits", 4, 4) or _one_of(settings, "version", "gemm", "gemm")


def _check_compressed(settings: dict[str, Any]) -> Unread:
    sparsity = settings.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        return "sparsity_config", "dense weights"
    # Rotations that must be computed for each token.
    if (settings.get("transform_config") or {}).get("config_groups"):
        return "transform_config", "weights without transforms"
    groups = settings.get("config_groups")
    if groups and not isinstance(groups, dict):
        return "config_groups", "an object of schemes"
    formats = [settings.get("format", "dense"), *(group.get("format") for group in (groups or {}).values())]
    unread = [each for each in formats if each is not None and each not in _COMPRESSED_FORMATS]
    return ("format", ", ".join(_COMPRESSED_FORMATS)) if unread else None


def _check_modelopt(settings: dict[str, Any]) -> Unread:
    return _one_of(settings, "quant_algo", None, "fp8", "mxfp8")


def _check_nothing(_settings: dict[str, Any]) -> Unread:
    return None


_ALIASES = {"fbgemm-fp8": "fp8", "compressed_tensors": "compressed-tensors"}
_CHECKS: dict[str, Callable[[dict[str, Any]], Unread]] = {
    "fp8": _check_fp8,
    "mxfp8": _check_nothing,
    "modelopt": _check_modelopt,
    "mxfp4": _check_nothing,
    "compressed-tensors": _check_compressed,
    "gptq": _check_gptq,
    "awq": _check_awq,
    "gguf": _check_nothing,
}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
