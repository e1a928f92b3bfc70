"""compressed-tensors, as llm-compressor writes them: integers in words, bytes, float8, and the four bits of MX and NV.

Source: the ``compressors`` of the compressed-tensors package, 0.20.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....shared.errors import ModelLoadError
from .declared import Quantization
from .scaled import FLOAT8, unpack_scaled
from .tensors import (
    Grid,
    Readable,
    StoredTensors,
    Unpacked,
    make_grid,
    unpack_e2m1,
    unpack_words,
    unpacked_integers,
    write_scaled,
)

_PACKED, _WEIGHT = ".weight_packed", ".weight"
_WORD = 32
_WHOLE_BITS = (1, 2, 4, 8)


def read_compressed(stored: StoredTensors, quantization: Quantization, dtype: torch.dtype) -> Readable:
    """Read ``X.weight_packed`` or ``X.weight``, with ``X.weight_scale`` and the other tensors of its scheme."""
    tensors: Readable = {}
    for name in stored:
        if name.endswith(_PACKED):
            layer = name.removesuffix(_PACKED)
            weights = _scheme(quantization, layer)
            unpack = _four_bit_floats if stored.dtype(name) == "U8" else _words
            tensors[layer + _WEIGHT] = unpack(stored, layer, weights, dtype)
        elif name.endswith(_WEIGHT) and stored.dtype(name) in ("I8", *FLOAT8):
            weights = _scheme(quantization, name.removesuffix(_WEIGHT))
            zero_point = f"{name}_zero_point" if f"{name}_zero_point" in stored else None
            tensors[name] = unpack_scaled(stored, name, _scale(stored, name), zero_point, _block(weights), dtype)
    return tensors


def _scheme(quantization: Quantization, layer: str) -> dict[str, Any]:
    """Return the settings for the weights of ``layer``: by its name or a pattern, else by its kind.

    Raises:
        ModelLoadError: no scheme applies.
    """
    groups = [group for group in (quantization.settings.get("config_groups") or {}).values() if group.get("weights")]

    def names(target: str) -> bool:
        if target.startswith("re:"):
            return re.match(target[3:], layer) is not None
        return target == layer

    # A target without a dot is the kind of a layer, usually Linear.
    by_name = [group for group in groups if any(names(target) for target in group.get("targets") or ())]
    by_kind = [group for group in groups if any("." not in target for target in group.get("targets") or ())]
    for group in (*by_name, *by_kind):
        return group["weights"]
    raise ModelLoadError(
        f"{layer} is quantised, and no group of config_groups in {quantization.source} is for it; fetch the model again"
    )


def _block(weights: dict[str, Any]) -> tuple[int, int] | None:
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy == "block" and weights.get("block_structure"):
        rows, columns = weights["block_structure"]
        return int(rows), int(columns)
    return (1, int(size)) if size and size > 0 else None


def _words(stored: StoredTensors, layer: str, weights: dict[str, Any], dtype: torch.dtype) -> Unpacked:
    """Unpack signed integers, stored with an offset of half their range, along a row of words."""
    bits = weights.get("num_bits")
    if bits not in _WHOLE_BITS:
        raise ModelLoadError(
            f"{layer} is packed in {bits} bits (num_bits of its weights), and 1, 2, 4 and 8 are read; fetch the model "
            "in one of these, or unquantised"
        )
    name = layer + _PACKED
    rows, columns = (int(size) for size in stored.read(f"{layer}.weight_shape"))
    num_rows, num_words = stored.shape(name)
    if num_rows != rows or num_words != -(-columns * bits // _WORD):
        raise ModelLoadError(
            f"{name} is {[num_rows, num_words]}, which is no weight of {[rows, columns]} in {bits} bits; fetch the "
            "model again"
        )
    half = 1 << (bits - 1)
    grid = _word_grid(stored, layer, (rows, columns), _block(weights), bits)

    def read() -> Callable[[slice], Tensor]:
        words = stored.read(name)
        return lambda part: unpack_words(words[part], bits)[:, :columns] - half

    return unpacked_integers((rows, columns), dtype, read, grid, bits, -half)


def _word_grid(
    stored: StoredTensors, layer: str, shape: tuple[int, int], block: tuple[int, int] | None, bits: int
) -> Grid:
    scale, zero_point = _scale(stored, layer + _WEIGHT), f"{layer}.weight_zero_point"
    scales, zeros = stored.read(scale), None
    if zero_point in stored:
        zeros = stored.read(zero_point)
        if zeros.dtype == torch.int32:
            # Packed along the rows.
            zeros = unpack_words(zeros.T.contiguous(), bits)[:, : shape[0]].T - (1 << (bits - 1))
        if zeros.numel() != scales.numel():
            raise ModelLoadError(f"{zero_point} has not a number for each of {scale}; fetch the model again")
    if f"{layer}.weight_g_idx" not in stored:
        return make_grid(scale, shape, scales, zeros, block)
    # Columns in the order of activations: each names its group.
    columns = stored.read(f"{layer}.weight_g_idx").long()
    if len(columns) != shape[1] or int(columns.max()) >= scales.shape[-1]:
        raise ModelLoadError(f"{layer}.weight_g_idx names groups that {scale} lacks; fetch the model again")
    return Grid(scales.float(), None if zeros is None else zeros.float(), torch.arange(shape[0]), columns)


def _four_bit_floats(stored: StoredTensors, layer: str, weights: dict[str, Any], dtype: torch.dtype) -> Unpacked:
    """Unpack E2M1: with a power of two per 32 values (MX), or a float8 per 16 under one factor for all (NV)."""
    packed = layer + _PACKED
    num_rows, num_bytes = stored.shape(packed)
    shape, scale, whole = (num_rows, 2 * num_bytes), f"{layer}.weight_scale", f"{layer}.weight_global_scale"
    scales = stored.read(_scale(stored, layer + _WEIGHT))
    if whole in stored:
        scales = scales.float() / stored.read(whole).float()
    grid = make_grid(scale, shape, scales, None, _block(weights))
    values = stored.slice(packed)
    return Unpacked(shape, dtype, partial(write_scaled, values=lambda rows: unpack_e2m1(values[rows]), grid=grid))


def _scale(stored: StoredTensors, weight: str) -> str:
    name = f"{weight}_scale"
    if name not in stored:
        raise ModelLoadError(f"{weight} is quantised, and {name} is in no file; fetch the model again")
    return name
