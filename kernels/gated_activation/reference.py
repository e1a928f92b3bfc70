"""Reference in plain torch: the ground truth of tests, and the fallback on any device."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See ``gated_activation.silu_and_mul``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(gate_up: Tensor, approximate: str) -> Tensor:
    """See ``gated_activation.gelu_and_mul``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)
