"""Reference in plain torch: the ground truth of tests, and the fallback on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..grouped_linear.reference import grouped_linear


def lora_shrink(inputs: Tensor, a: Tensor, token_lora: Tensor) -> Tensor:
    """See ``lora.lora_shrink``."""
    dtype = torch.promote_types(inputs.dtype, torch.float32)  # float64 is used by tests
    return grouped_linear(inputs.to(dtype), a.to(dtype), token_lora[:, None])[:, 0]


def lora_expand(inputs: Tensor, b: Tensor, token_lora: Tensor, out: Tensor, scale: float) -> None:
    """See ``lora.lora_expand``."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    rounded = inputs.to(out.dtype).to(dtype)
    update = scale * grouped_linear(rounded, b.to(dtype), token_lora[:, None])[:, 0]
    has_adapter = token_lora >= 0
    out[has_adapter] = (out[has_adapter].to(dtype) + update[has_adapter]).to(out.dtype)
