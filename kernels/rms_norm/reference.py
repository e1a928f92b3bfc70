"""Reference in plain torch: the ground truth of tests, and the fallback on any device.

The order of casts is that of transformers' models.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``rms_norm.rms_norm``."""
    wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    variance = wide.square().mean(-1, keepdim=True)
    scaled = wide * variance.add_(eps).rsqrt_()
    return scaled.to(inputs.dtype) * weight if weight.dtype is inputs.dtype else (scaled * weight).to(inputs.dtype)


def add_rms_norm(inputs: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``rms_norm.add_rms_norm``."""
    residual = residual + inputs
    return rms_norm(residual, weight, eps), residual
