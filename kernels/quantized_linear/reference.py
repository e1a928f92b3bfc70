"""Reference in plain torch: the ground truth of tests, and the fallback on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rotation import rotate

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize_rows(inputs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See ``quantized_linear.quantize_rows``."""
    wide = rotate(inputs) if dtype == torch.int8 else inputs.float()
    largest = wide.abs().amax(dim=-1)
    # Divide by a tensor: on a GPU torch divides by a number by multiplying with its reciprocal, which rounds twice.
    scales = torch.where(largest > 0, largest / torch.full_like(largest, LARGEST[dtype]), 1.0)
    steps = wide / scales[:, None]
    if dtype == torch.int8:
        steps = torch.floor(steps + 0.5)
    # Rounding may exceed the largest value slightly.
    return steps.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype), scales


def multiply(
    rows: Tensor, row_scales: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the product of ``[T, K]`` and ``[N, K]``, both quantized, in ``dtype``."""
    # Sums of int8 are exact in float64; float32 has too few bits for them.
    total = rows.double() @ values.double().T
    total = total * row_scales[:, None] * scales
    return (total if bias is None else total + bias).to(dtype)
