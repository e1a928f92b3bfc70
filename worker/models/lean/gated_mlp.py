"""A feed-forward layer that all tokens go through."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ....kernels.gated_activation import activate, activate_and_mul
from .fuse import fuse_linear
from .plan import FeedForwardPlan


class GatedMlp(nn.Module):
    """A dense feed-forward layer with gate and up projection in one, or without a gate.

    Args:
        inner: projections before the activation: gate and up, or one in which both are, or one without a gate.
    """

    def __init__(self, inner: Sequence[nn.Linear], down: nn.Linear, activation: str, *, is_gated: bool = True) -> None:
        super().__init__()
        self.gate_up_proj = fuse_linear(inner)
        self.down_proj = down
        self.activation = activation
        self.is_gated = is_gated
        self._activate = partial(activate_and_mul if is_gated else activate, activation=activation)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self._activate(self.gate_up_proj(hidden)))


def make_dense(own: nn.Module, plan: FeedForwardPlan) -> GatedMlp:
    """The "gated" or "plain" part that ``plan`` says, on the weights of ``own``, the whole model."""
    inner: Any = [own.get_submodule(name) for name in plan.inner]
    down: Any = own.get_submodule(plan.down)
    return GatedMlp(inner, down, plan.activation, is_gated=plan.kind == "gated")
