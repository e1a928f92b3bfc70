"""Bytes that the weights of a folder take in memory, by the headers of its files: without torch, before it is loaded.

Most formats of fewer bits are widened when they are loaded, so files may be much smaller.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....shared.errors import ModelLoadError
from .declared import CONFIG_FILE, Quantization, declared_quantization
from .headers import StoredHeader, read_headers, weight_files

DTYPE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}
# Bits of a number by ``quantization``, with its part of the scales.
QUANTIZED_BITS: Mapping[str, float] = {"int8": 8, "fp8": 8, "int4": 4.5, "int4-mixed": 6}
_BYTE, _WORD = 8, 32
_STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float32"}
_EIGHT_BITS = ("I8", "F8_E4M3", "F8_E5M2")
# Bits per number that our kernels know, by the inputs that share a scale of ``_SCALE_BITS``.
_WIDTHS = {32: (4, 5, 8), 16: (4, 6, 8)}
_SCALE_BITS = 16
_AWQ_BITS = 4
# Scales, zero points and the like of other tensors, which are not kept.
_OF_ANOTHER = re.compile(r"(qzeros|scales?|g_idx|zero_point|weight_shape|scale_inv|scale_ub)$")
_EMBEDDING = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe)\.")


@dataclass(frozen=True)
class _Weight:
    """A weight as a model computes with it.

    Args:
        number_bits: of a number that our kernels use as it is in the file; None if they cannot.
    """

    name: str
    num_elements: int
    num_dims: int
    number_bits: float | None = None


def folder_bytes(
    folder: Path, dtype: str, quantization: str | None, *, takes_numbers: bool, has_packed_head: bool
) -> int:
    """Estimate the bytes of the weights as the loader holds them.

    Args:
        folder: with safetensors files.
        dtype: of weights that are not quantized; "auto" for that of the configuration.
        quantization: of matrices; None for that of the files, or none.
        takes_numbers: whether kernels use the integers of the files, where they can.
        has_packed_head: whether the matrix of logits is packed, so that one shared with the embedding is there twice.

    Raises:
        ModelLoadError: a file is missing or damaged, or quantized tensors do not fit each other.
    """
    stored, declared = read_headers(weight_files(folder)), declared_quantization(folder)
    config = json.loads((folder / CONFIG_FILE).read_bytes())
    dtype_bits = DTYPE_BITS[_dtype_of(config, stored) if dtype == "auto" else dtype]

    def bits(weight: _Weight) -> float:
        is_matrix = weight.num_dims in (2, 3) and not _EMBEDDING.search(weight.name)
        if is_matrix and quantization is not None:
            return QUANTIZED_BITS[quantization]
        return weight.number_bits if takes_numbers and weight.number_bits is not None else dtype_bits

    try:
        weights = list(_weights_of(stored, declared))
    except (IndexError, ZeroDivisionError) as error:
        raise ModelLoadError(f"quantised tensors of {folder} do not fit each other; fetch the model again") from error
    total = sum(weight.num_elements * bits(weight) for weight in weights)
    if has_packed_head:
        size = _vocab_size(config)
        shared = [name for name, header in stored.items() if header.shape[:1] == (size,) and len(header.shape) == 2]
        if len(shared) == 1:
            head_bits = dtype_bits if quantization is None else QUANTIZED_BITS[quantization]
            total += stored[shared[0]].num_elements * head_bits
    return math.ceil(total / _BYTE)


def _weights_of(stored: Mapping[str, StoredHeader], declared: Quantization | None) -> Iterator[_Weight]:
    """Yield the weights that the tensors of the files are, or are unpacked to."""
    for name, header in stored.items():
        layer, _, leaf = name.rpartition(".")
        if declared is not None and _OF_ANOTHER.search(name):
            continue
        if header.dtype in _STORED_DTYPES or header.dtype in _EIGHT_BITS:
            yield _Weight(name, header.num_elements, len(header.shape))
        elif header.dtype == "U8" and declared is not None:
            # Two numbers of four bits; the blocks of experts have an axis of their own.
            yield _Weight(name, 2 * header.num_elements, min(3, len(header.shape)))
        elif leaf == "qweight" and declared is not None:
            yield _columns_in_words(stored, layer, declared)
        elif leaf == "weight_packed" and declared is not None:
            yield _rows_in_words(stored, layer)


def _columns_in_words(stored: Mapping[str, StoredHeader], layer: str, declared: Quantization) -> _Weight:
    """Return a weight of GPTQ or AWQ."""
    words, zeros, scales = stored[f"{layer}.qweight"], stored.get(f"{layer}.qzeros"), stored.get(f"{layer}.scales")
    bits, num_groups = _AWQ_BITS, scales.shape[0] if scales is not None else 1
    if declared.method == "gptq" and zeros is not None:
        # Layers may differ from the configuration.
        bits = max(1, round(zeros.shape[-1] * _WORD / words.shape[-1]))
    num_elements = words.num_elements * _WORD // bits
    num_outputs = scales.shape[-1] if scales is not None else 1
    is_plain = not declared.settings.get("desc_act")
    has_minimums = declared.method == "awq" or not declared.settings.get("sym", True)
    number_bits = _number_bits(bits, num_elements // num_outputs // num_groups, has_minimums=has_minimums)
    return _Weight(f"{layer}.weight", num_elements, 2, number_bits if is_plain else None)


def _rows_in_words(stored: Mapping[str, StoredHeader], layer: str) -> _Weight:
    """Return a weight of compressed-tensors in words."""
    words, scales = stored[f"{layer}.weight_packed"], stored.get(f"{layer}.weight_scale")
    shape = stored.get(f"{layer}.weight_shape")
    num_rows, num_columns = shape.read_pair() if shape is not None else words.shape
    num_elements = num_rows * num_columns
    bits = words.num_elements * _WORD // max(1, num_elements)
    num_groups = scales.shape[-1] if scales is not None and len(scales.shape) > 1 else 1
    is_plain = f"{layer}.weight_g_idx" not in stored
    has_minimums = f"{layer}.weight_zero_point" in stored
    number_bits = _number_bits(bits, num_columns // num_groups, has_minimums=has_minimums)
    return _Weight(f"{layer}.weight", num_elements, 2, number_bits if is_plain else None)


def _number_bits(bits: int, num_inputs: int, *, has_minimums: bool) -> float | None:
    """Return the bits of a number with its part of the scales; None if our kernels cannot use the groups."""
    size = next((size for size in _WIDTHS if num_inputs and num_inputs % size == 0), None)
    if size is None:
        return None
    width = next((width for width in _WIDTHS[size] if width >= bits), None)
    return None if width is None else width + (1 + has_minimums) * _SCALE_BITS / size


def _dtype_of(config: dict[str, Any], stored: Mapping[str, StoredHeader]) -> str:
    """Return the dtype of the configuration, else that of the first tensor that is not quantized."""
    text = config.get("text_config")
    for part in (text if isinstance(text, dict) else {}, config):
        declared = str(part.get("dtype") or part.get("torch_dtype")).removeprefix("torch.")
        if declared in DTYPE_BITS:
            return declared
    plain = (_STORED_DTYPES.get(header.dtype) for name, header in stored.items() if "scale" not in name)
    return next((dtype for dtype in plain if dtype is not None), "bfloat16")


def _vocab_size(config: dict[str, Any]) -> int | None:
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    return size if isinstance(size, int) else None
