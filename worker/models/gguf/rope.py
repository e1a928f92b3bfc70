"""Positions of a GGUF file's model as transformers' ``rope_parameters``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....shared.errors import ModelLoadError
from ....shared.values.shown import shown
from .container import GgufFile

_THETA = 10000.0
# Llama 3's scaling, which GGUF stores as a divisor per frequency; values of all released models.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
# Divisors are stored in float32.
_TOLERANCE = 1e-4


def rope_parameters(file: GgufFile, key: str, head_dim: int) -> dict[str, Any]:
    """Return ``rope_parameters`` of config.json.

    Raises:
        ModelLoadError: the scaling of positions cannot be expressed there.
    """
    values = file.values
    theta = real_value(file, f"{key}.rope.freq_base", _THETA)
    if "rope_freqs.weight" in file.tensors:
        return _llama3(file, theta, head_dim)
    original = values.get(f"{key}.rope.scaling.original_context_length")
    if "rope_factors_long.weight" in file.tensors:
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "long_factor": float32_tensor(file, "rope_factors_long.weight").tolist(),
            "short_factor": float32_tensor(file, "rope_factors_short.weight").tolist(),
            "original_max_position_embeddings": original,
        }
    kind = values.get(f"{key}.rope.scaling.type", "none")
    name = "scaling.factor" if f"{key}.rope.scaling.factor" in values else "scale_linear"
    factor = real_value(file, f"{key}.rope.{name}", 1.0)
    if kind in ("none", "linear") and factor in (0.0, 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn" and original is not None:
        betas = {name: values.get(f"{key}.rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": int(original),
            **{name: value for name, value in betas.items() if value is not None},
        }
    raise ModelLoadError(
        f"{file.path} stretches positions by {key}.rope.scaling.type {shown(kind)}, which is not read from GGUF files; "
        "fetch the model in transformers' format"
    )


def real_value(file: GgufFile, name: str, default: float) -> float:
    """Return a number of ``file``. Raises ``ModelLoadError`` if the value is no number, or negative."""
    value = file.values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ModelLoadError(f"{file.path} has {name} {shown(value)}, and a number is wanted there; fetch it again")
    return float(value)


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    divisors = float32_tensor(file, "rope_freqs.weight")
    factor = round(float(divisors.max(initial=0.0)), 3)
    if len(divisors) == head_dim // 2 and factor >= 1:
        if factor == 1:
            return {"rope_type": "default", "rope_theta": theta}
        if np.allclose(divisors, llama3_divisors(theta, head_dim, factor), rtol=_TOLERANCE):
            return {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": factor,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": _ORIGINAL,
            }
    raise ModelLoadError(
        f"{file.path} has rope_freqs.weight {shown(divisors[:4].tolist())}, which are not Llama 3's divisors of "
        "frequencies; fetch the model in transformers' format"
    )


def float32_tensor(file: GgufFile, name: str) -> np.ndarray:
    """Return the numbers of a small tensor. Raises ``ModelLoadError`` if it is missing, or quantised."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.kind.name != "F32":
        raise ModelLoadError(f"{file.path} has no {name} in F32, by which positions are stretched; fetch it again")
    return np.array(tensor.data).view(np.float32).ravel()


def llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """Return the divisor of each of Llama 3's frequencies: [head_dim / 2]."""
    wave_lengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (_ORIGINAL / wave_lengths - _LOW) / (_HIGH - _LOW)
    return 1 / np.clip((1 - smooth) / factor + smooth, 1 / factor, 1)
