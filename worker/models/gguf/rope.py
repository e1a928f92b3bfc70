"""How a GGUF file says that positions are rotated, in transformers' words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....shared.errors import ModelLoadError
from ....shared.shown import shown
from .container import GgufFile

_THETA = 10000.0
# Llama 3's way of stretching, which GGUF has as a divisor for each frequency; what all released models have.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
# Divisors are stored in float32.
_TOLERANCE = 1e-4


def rope_parameters(file: GgufFile, key: str, head_dim: int) -> dict[str, Any]:
    """``rope_parameters`` of config.json.

    Raises:
        ModelLoadError: positions are stretched in a way that cannot be said there.
    """
    values = file.values
    theta = real_value(file, f"{key}.rope.freq_base", _THETA)
    if "rope_freqs.weight" in file.tensors:
        return _llama3(file, theta, head_dim)
    kind = values.get(f"{key}.rope.scaling.type", "none")
    name = "scaling.factor" if f"{key}.rope.scaling.factor" in values else "scale_linear"
    factor = real_value(file, f"{key}.rope.{name}", 1.0)
    if kind in ("none", "linear") and factor in (0.0, 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    original = values.get(f"{key}.rope.scaling.original_context_length")
    if kind == "yarn" and original is not None:
        original = int(original)
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise ModelLoadError(
        f"{file.path} stretches positions by {key}.rope.scaling.type {shown(kind)}, which is not read from GGUF files; "
        "fetch the model in transformers' format"
    )


def real_value(file: GgufFile, name: str, default: float) -> float:
    """Raises ``ModelLoadError`` if what ``file`` has by ``name`` is no number, or less than zero."""
    found = file.values.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int | float) or not found >= 0:
        raise ModelLoadError(f"{file.path} has {name} {shown(found)}, and a number is wanted there; fetch it again")
    return float(found)


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    tensor = file.tensors["rope_freqs.weight"]
    found = np.array(tensor.data).view(np.float32).ravel() if tensor.kind.name == "F32" else np.zeros(0)
    factor = round(float(found.max(initial=0.0)), 3)
    if len(found) == head_dim // 2 and factor >= 1:
        if factor == 1:
            return {"rope_type": "default", "rope_theta": theta}
        if np.allclose(found, llama3_divisors(theta, head_dim, factor), rtol=_TOLERANCE):
            return {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": factor,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": _ORIGINAL,
            }
    raise ModelLoadError(
        f"{file.path} has rope_freqs.weight {shown(found[:4].tolist())}, which are not Llama 3's divisors of "
        "frequencies; fetch the model in transformers' format"
    )


def llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """What Llama 3 divides each of its frequencies by: [head_dim / 2]."""
    wave_lengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (_ORIGINAL / wave_lengths - _LOW) / (_HIGH - _LOW)
    return 1 / np.clip((1 - smooth) / factor + smooth, 1 / factor, 1)
