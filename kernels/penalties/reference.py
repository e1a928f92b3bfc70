"""Reference in plain torch: the ground truth of tests, and the fallback on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def penalize(logits: Tensor, rows: Tensor, token_ids: Tensor, repetition: Tensor, deduction: Tensor) -> None:
    """See ``penalties.penalize``."""
    rows, token_ids, repetition, deduction = (
        tensor.to(logits.device) for tensor in (rows, token_ids, repetition, deduction)
    )
    chosen = logits[rows, token_ids]
    chosen = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
    logits[rows, token_ids] = chosen - deduction
