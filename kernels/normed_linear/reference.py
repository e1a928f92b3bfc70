"""Reference in plain torch: the ground truth of tests, and the fallback on any device."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..gated_activation import activate_and_mul
from ..rms_norm import add_rms_norm


def normed_linear(
    hidden: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """See ``normed_linear.normed_linear``; may overwrite ``hidden`` and ``residual``."""
    normed, residual = add_rms_norm(hidden, residual, norm_weight, eps)
    rows = F.linear(normed, weight, bias)
    return rows if activation is None else activate_and_mul(rows, activation), residual
