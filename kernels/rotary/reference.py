"""Plain torch: the ground truth, and what runs on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``rotary.apply_rotary``."""
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return heads * cos[:, None] + turned.mul_(sin[:, None])
