"""Plain torch: the ground truth."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize_rows(inputs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See ``quantized_linear.quantize_rows``."""
    wide = inputs.float()
    largest = wide.abs().amax(dim=-1)
    # By a tensor: on a GPU torch makes of a division by a number a product with its reciprocal, which is rounded twice.
    scales = torch.where(largest > 0, largest / torch.full_like(largest, LARGEST[dtype]), 1.0)
    steps = wide / scales[:, None]
    if dtype == torch.int8:
        steps = torch.floor(steps + 0.5)
    # Rounding may take the largest just over what there is.
    return steps.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype), scales


def multiply(
    rows: Tensor, row_scales: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The product of ``[T, K]`` and ``[N, K]``, both of bytes, in ``dtype``."""
    # Sums of int8 are exact in float64, and float32 has too few bits for them.
    total = rows.double() @ values.double().T
    total = total * row_scales[:, None] * scales
    return (total if bias is None else total + bias).to(dtype)
