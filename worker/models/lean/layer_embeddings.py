"""Embeddings of tokens that layers have of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .norms import make_norm
from .plan import LayerEmbeddingsPlan


class LayerEmbeddings(nn.Module):
    """See ``LayerEmbeddingsPlan``.

    Args:
        own: the whole model.
    """

    def __init__(self, own: nn.Module, plan: LayerEmbeddingsPlan, device: torch.device) -> None:
        super().__init__()
        self.plan = plan
        self.embedding: Any = own.get_submodule(plan.embedding)
        self.projection: Any = own.get_submodule(plan.projection)
        self.norm: Any = make_norm(own.get_submodule(plan.norm.name), plan.norm, device)

    def forward(self, stream: Tensor, token_ids: Tensor) -> Tensor:
        """Those of tokens ``[T]`` whose first embeddings are ``stream [T, hidden size]``: ``[T, layers, size]``."""
        plan = self.plan
        projected = (self.projection(stream) * plan.projection_scale).unflatten(-1, (-1, plan.size))
        normed = self.norm(projected.flatten(0, 1)).view_as(projected)
        return (normed + self.embedding(token_ids).view_as(normed)) * plan.sum_scale
