"""Linear layers with weights and inputs of one byte per element, int8 or float8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch import REFERENCE, KernelInputError, OnGpu, select
from ..rotation import rotate
from . import reference

DTYPES = (torch.int8, torch.float8_e4m3fn)

_GPU = f"{__package__}.gpu"
_QUANTIZE = {REFERENCE: reference.quantize_rows, "cuda": OnGpu(_GPU, "quantize_rows")}
_MULTIPLY = {REFERENCE: reference.multiply, "cuda": OnGpu(_GPU, "multiply")}


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight ``[N, K]``, quantized with a scale per output.

    Args:
        values: ``[N, K]`` int8, of rotated rows, or float8_e4m3fn, contiguous.
        scales: ``[N]`` float32.
        bias: ``[N]`` of any float dtype, or None.
    """

    values: Tensor
    scales: Tensor
    bias: Tensor | None = None


def quantize_weight(weight: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> QuantizedWeight:
    """Quantize a weight ``[N, K]`` of a float dtype; ``bias``, ``[N]``, keeps its dtype.

    Raises:
        KernelInputError: a shape or dtype above does not hold.
    """
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        raise KernelInputError(f"bias must be [{len(weight)}] of a float dtype, got {tuple(bias.shape)} {bias.dtype}")
    return QuantizedWeight(*quantize_rows(weight, dtype), bias)


def dequantize_weight(weight: QuantizedWeight) -> Tensor:
    """Return the weight ``[N, K]`` in float32."""
    plain = weight.values.float() * weight.scales[:, None]
    return rotate(plain) if weight.values.dtype == torch.int8 else plain


def quantize_rows(inputs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize rows, with scales that map the largest magnitude of a row to the largest value of ``dtype``.

    For int8, rows are rotated first (``kernels/rotation.py``). Float8 needs no rotation, since its steps are relative.

    Args:
        inputs: ``[T, K]`` of a float dtype, last axis contiguous.
        dtype: int8, whose largest value is 127, or float8_e4m3fn, whose largest is 448.

    Returns:
        ``[T, K]`` of ``dtype`` and scales ``[T]`` float32, 1 for a row of zeros. A row does not depend on the other
        rows, and has the same bits on every device.

    Raises:
        KernelInputError: a shape, dtype or stride above does not hold.

    Cost: memory bound, ``T * K * (2 * itemsize + 1)`` bytes; the second read comes from a cache. For int8 the rotated
    rows are also written and read, ``T * K * 8`` bytes.
    Source: Dettmers et al. 2022 (arXiv:2208.07339), rows; Micikevicius et al. 2022 (arXiv:2209.05433), float8.
    """
    if inputs.ndim != 2 or not inputs.is_floating_point() or inputs.stride(1) != 1:
        actual = f"{tuple(inputs.shape)} {inputs.dtype} with strides {inputs.stride()}"
        raise KernelInputError(f"inputs must be [T, K] of a float dtype, rows contiguous, got {actual}")
    if dtype not in DTYPES:
        raise KernelInputError(f"dtype must be one of {DTYPES}, got {dtype}")
    return select(_QUANTIZE, inputs.device, inputs.dtype)(inputs, dtype)


def quantized_linear(inputs: Tensor, weight: QuantizedWeight) -> Tensor:
    """Return ``inputs @ weight.T + bias``; each row of inputs is quantized on the fly.

    Args:
        inputs: ``[T, K]`` of a float dtype, last axis contiguous.

    Returns:
        ``[T, N]``, dtype of ``inputs``. For int8, sums are exact in int32 (``K`` up to 133,000), scaled in float32 and
        rounded once, so that the bits of a row do not depend on the other rows or their number. For float8, sums are
        float32, and the bits stay the same as long as ``T`` stays within 1 to 16, 17 to 64, or above.

    Raises:
        KernelInputError: a shape or dtype above does not hold.

    Cost: ``2 * T * N * K`` operations; for few rows memory bound, ``N * K`` bytes.
    """
    values, scales = weight.values, weight.scales
    if values.ndim != 2 or values.dtype not in DTYPES or not values.is_contiguous() or scales.shape != values.shape[:1]:
        actual = f"{tuple(values.shape)} {values.dtype} with {tuple(scales.shape)} scales"
        raise KernelInputError(f"weight must be contiguous [N, K] of {DTYPES} with [N] scales, got {actual}")
    if inputs.ndim != 2 or inputs.shape[1] != values.shape[1]:
        raise KernelInputError(f"inputs must be [T, {values.shape[1]}], got {tuple(inputs.shape)}")
    rows, row_scales = quantize_rows(inputs, values.dtype)
    run = select(_MULTIPLY, inputs.device, inputs.dtype)
    return run(rows, row_scales, values, scales, weight.bias, inputs.dtype)
