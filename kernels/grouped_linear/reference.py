"""Reference in plain torch: the ground truth of tests, and the fallback on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_linear(inputs: Tensor, weight: Tensor, group_ids: Tensor) -> Tensor:
    """See ``grouped_linear.grouped_linear``."""
    num_tokens, num_groups_each = group_ids.shape
    out = inputs.new_zeros(num_tokens, num_groups_each, weight.shape[1])
    for group in range(len(weight)):
        tokens, columns = torch.where(group_ids == group)
        if len(tokens):
            out[tokens, columns] = inputs[tokens] @ weight[group].T
    return out
