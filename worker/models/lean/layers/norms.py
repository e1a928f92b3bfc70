"""Norms over rows, built from a model's own by its plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....kernels.rms_norm import add_rms_norm, rms_norm
from ...plan import NormPlan


class Norm(nn.Module):
    """RMSNorm. The weight is in float32 if the result is rounded once."""

    bias = None

    def __init__(self, own: Any, plan: NormPlan, device: torch.device) -> None:
        super().__init__()
        self.weight = _weight_of(own, plan, device)
        self.eps = plan.eps

    def forward(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, self.weight, self.eps)

    def add(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised sum of both, and the sum."""
        return add_rms_norm(hidden, residual, self.weight, self.eps)


class CentredNorm(nn.Module):
    """LayerNorm, in float32."""

    def __init__(self, own: Any, plan: NormPlan, device: torch.device) -> None:
        super().__init__()
        self.weight = _weight_of(own, plan, device)
        bias = getattr(own, "bias", None)
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)
        self.eps = plan.eps

    def forward(self, rows: Tensor) -> Tensor:
        if self.weight.ndim == 1:
            return F.layer_norm(rows.float(), self.weight.shape, self.weight, self.bias, self.eps).to(rows.dtype)
        normed = F.layer_norm(rows.float(), rows.shape[-1:], None, None, self.eps) * self.weight
        return (normed if self.bias is None else normed + self.bias).to(rows.dtype)

    def add(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Norm.add``."""
        residual = residual + hidden
        return self(residual), residual


class NoNorm(nn.Module):
    """The identity, for a norm that a model does not have."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows

    def add(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Norm.add``."""
        residual = residual + hidden
        return residual, residual


AnyNorm = Norm | CentredNorm | NoNorm


def make_norm(own: nn.Module | None, plan: NormPlan | None, device: torch.device) -> AnyNorm:
    """Return the module of ``plan``, with the weight of ``own``."""
    if own is None or plan is None:
        return NoNorm()
    return CentredNorm(own, plan, device) if plan.is_centred else Norm(own, plan, device)


def _weight_of(own: Any, plan: NormPlan, device: torch.device) -> nn.Parameter:
    """Return the weight that the norm uses: ``own.weight`` itself unless it must be widened."""
    weight = getattr(own, "weight", None)
    if weight is None:
        return nn.Parameter(torch.ones(plan.size, device=device), requires_grad=False)
    if not plan.is_wide:
        return weight
    # In place, since the sum of a weight without content would import torch's compiler: half a second and 100 MiB.
    return nn.Parameter(weight.detach().to(torch.float32, copy=True).add_(plan.offset), requires_grad=False)
