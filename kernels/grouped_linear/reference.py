"""Plain torch: the ground truth, and what runs on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_linear(inputs: Tensor, weight: Tensor, group_ids: Tensor) -> Tensor:
    """See ``grouped_linear.grouped_linear``."""
    num_tokens, num_groups_each = group_ids.shape
    out = inputs.new_zeros(num_tokens, num_groups_each, weight.shape[1])
    for group in range(len(weight)):
        tokens, places = torch.where(group_ids == group)
        if len(tokens):
            out[tokens, places] = inputs[tokens] @ weight[group].T
    return out
