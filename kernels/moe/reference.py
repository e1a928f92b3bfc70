"""Reference in plain torch: the ground truth of tests, and the fallback on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gated_activation.reference import silu_and_mul
from ..grouped_linear.reference import grouped_linear


def route(
    logits: Tensor, num_chosen: int, scoring: str, renormalizes: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``moe.route``."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scores = torch.softmax(wide, dim=-1) if scoring == "softmax" else torch.sigmoid(wide)
    # A stable sort takes the first of equal scores; topk takes any.
    order = (scores if bias is None else scores + bias).argsort(dim=-1, descending=True, stable=True)
    ids = order[:, :num_chosen]
    weights = scores.gather(1, ids)
    if renormalizes:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + (0.0 if scoring == "softmax" else 1e-20))
    return weights * scale, ids.int()


def experts(hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """See ``moe.experts``."""
    num_tokens, num_chosen = ids.shape
    inner = silu_and_mul(grouped_linear(hidden, gate_up, ids).flatten(0, 1))
    outputs = grouped_linear(inner, down, ids.reshape(-1, 1)).view(num_tokens, num_chosen, -1)
    return torch.einsum("tj,tje->te", weights.to(hidden.dtype), outputs)
