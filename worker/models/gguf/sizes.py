"""Bytes that the weights of a GGUF file take in memory, by its header: without torch, before the file is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..formats.sizes import DTYPE_BITS, QUANTIZED_BITS
from .container import GgufFile, GgufTensor

_BYTE = 8
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
# Bits of a number, with its part of the scales, where our kernels compute with the numbers of a file
# (``kernels/linear/blocks.py``).
NUMBER_BITS: Mapping[str, float] = {
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q5_0": 5.5,
    "Q5_1": 6,
    "Q8_0": 8.5,
    "Q2_K": 6,
    "Q3_K": 5,
    "Q4_K": 5,
    "Q5_K": 6,
    "Q6_K": 7,
    "IQ4_NL": 8.5,
    "IQ4_XS": 8.5,
    "MXFP4": 5.5,
}


def weight_bytes(
    file: GgufFile, dtype: str, quantization: str | None, *, takes_numbers: bool, has_packed_head: bool
) -> int:
    """Estimate the bytes of the weights as the loader holds them.

    Args:
        dtype: of weights that are not quantized.
        quantization: of matrices; None for that of the file, or none.
        takes_numbers: whether kernels use the numbers of the file, where they can.
        has_packed_head: whether the matrix of logits is packed, so that one shared with the embedding is there twice.
    """

    def matrix_bits(tensor: GgufTensor) -> float:
        if quantization is not None:
            return QUANTIZED_BITS[quantization]
        return NUMBER_BITS.get(tensor.kind.name, DTYPE_BITS[dtype]) if takes_numbers else DTYPE_BITS[dtype]

    bits = 0.0
    for tensor in file.tensors.values():
        is_matrix = len(tensor.shape) > 1 and tensor.name != _EMBEDDING
        bits += math.prod(tensor.shape) * (matrix_bits(tensor) if is_matrix else DTYPE_BITS[dtype])
    embedding = file.tensors.get(_EMBEDDING)
    if has_packed_head and embedding is not None and _HEAD not in file.tensors:
        bits += math.prod(embedding.shape) * matrix_bits(embedding)
    return math.ceil(bits / _BYTE)
