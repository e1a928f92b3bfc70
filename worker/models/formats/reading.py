"""Read all tensors of a quantized checkpoint by the names that they would have without quantization."""

from __future__ import annotations

import re
from collections.abc import Callable

import structlog
import torch

from .compressed import read_compressed
from .declared import Quantization
from .scaled import read_float8, read_mxfp4
from .tensors import Readable, StoredTensors
from .words import read_awq, read_gptq

READERS: dict[str, Callable[[StoredTensors, Quantization, torch.dtype], Readable]] = {
    "fp8": read_float8,
    "mxfp8": read_float8,
    "modelopt": read_float8,
    "mxfp4": read_mxfp4,
    "compressed-tensors": read_compressed,
    "gptq": read_gptq,
    "awq": read_awq,
}
# Tensors that belong to a weight.
_OF_A_WEIGHT = {
    "weight": (
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
        "weight_packed",
        "weight_shape",
        "weight_g_idx",
        "weight_scale",
        "weight_scale_inv",
        "weight_zero_point",
        "weight_global_scale",
    )
}
# Scales of activations and of the KV cache. Our activations are not quantized, and our cache has its own scales.
_OF_ANOTHER_THING = re.compile(
    r"[._](input|output|activation|act|q|k|v|kv|prob|k_cache|v_cache)_(global_)?(scale|zero_point)(_inv|_ub)?$"
)

log = structlog.get_logger(__name__)


def read_plain(stored: StoredTensors, quantization: Quantization, dtype: torch.dtype) -> Readable:
    """Return every tensor: quantized ones in ``dtype``, unpacked on request, others as they are in the file.

    Raises:
        ModelLoadError: tensors lack companions, or do not fit each other.
    """
    unpacked = READERS[quantization.method](stored, quantization, dtype)
    used = {companion for name in unpacked for companion in _companions(name)}
    ignored = [name for name in stored if name not in unpacked and _OF_ANOTHER_THING.search(name)]
    if ignored:
        log.info("scales_ignored", count=len(ignored), such_as=ignored[:3])
    plain = (name for name in stored if name not in used and name not in ignored)
    return {name: stored.slice(name) for name in plain} | unpacked


def _companions(name: str) -> tuple[str, ...]:
    layer, _, leaf = name.rpartition(".")
    plain = tuple(f"{layer}.{each}" for each in _OF_A_WEIGHT.get(leaf, ()))
    return (*plain, *(f"{name}{end}" for end in ("_scale", "_scale_inv", "_blocks", "_scales")))


def dtype_of(stored: StoredTensors) -> torch.dtype:
    """Return the dtype of the first tensor that is not quantized, if config.json has none; bfloat16 if there is
    none.
    """
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    plain = (stored.dtype(name) for name in stored if "scale" not in name)
    return next((kinds[kind] for kind in plain if kind in kinds), torch.bfloat16)
