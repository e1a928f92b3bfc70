"""All tensors of a quantised checkpoint by the names that it would have had unquantised."""

from __future__ import annotations

import re
from collections.abc import Callable

import structlog
import torch

from .compressed import read_compressed
from .declared import Quantization
from .scaled import read_float8, read_mxfp4
from .stored import StoredTensors
from .unpacked import Readable
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
# What belongs to a weight that was made whole.
_OF_A_WEIGHT = {
    "weight": (
        *("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_shape", "weight_g_idx"),
        *("weight_scale", "weight_scale_inv", "weight_zero_point", "weight_global_scale"),
    )
}
# Of activations and of the KV cache. Ours are computed as they are, and the cache has scales of its own.
_OF_ANOTHER_THING = re.compile(
    r"[._](input|output|activation|act|q|k|v|kv|prob|k_cache|v_cache)_(global_)?(scale|zero_point)(_inv|_ub)?$"
)

log = structlog.get_logger(__name__)


def read_plain(stored: StoredTensors, quantization: Quantization, dtype: torch.dtype) -> Readable:
    """Every tensor: the quantised ones in ``dtype``, made when asked for, the others as they are in the file.

    Raises:
        ModelLoadError: tensors lack what belongs to them, or do not fit each other.
    """
    made = READERS[quantization.method](stored, quantization, dtype)
    used = {companion for name in made for companion in _companions(name)}
    passed_over = [name for name in stored if name not in made and _OF_ANOTHER_THING.search(name)]
    if passed_over:
        log.info("scales_passed_over", count=len(passed_over), such_as=passed_over[:3])
    kept = (name for name in stored if name not in used and name not in passed_over)
    return {name: stored.slice(name) for name in kept} | made


def _companions(name: str) -> tuple[str, ...]:
    layer, _, leaf = name.rpartition(".")
    plain = tuple(f"{layer}.{each}" for each in _OF_A_WEIGHT.get(leaf, ()))
    return (*plain, *(f"{name}{end}" for end in ("_scale", "_scale_inv", "_blocks", "_scales")))


def dtype_of(stored: StoredTensors) -> torch.dtype:
    """Where config.json does not say it: that of the first tensor that is not quantised; bfloat16 if there is none."""
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    plain = (stored.dtype(name) for name in stored if "scale" not in name)
    return next((kinds[kind] for kind in plain if kind in kinds), torch.bfloat16)
