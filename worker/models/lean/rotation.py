"""The rotary embedding: angles as the model makes them, and heads rotated by them."""

from __future__ import annotations

from torch import Tensor, nn

from ....kernels.rotary import apply_rotary
from .plan import AnglesPlan, RotationPlan


def angles_of(module: nn.Module, plan: AnglesPlan, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[T, R]`` of ``positions`` by the model's own code, their two halves alike.

    Args:
        hidden: a tensor of the dtype and on the device that they are to have.
    """
    cos, sin = module(hidden, positions[None], *plan.arguments, **dict(plan.options))
    return as_halves(cos, plan), as_halves(sin, plan)


def as_halves(angles: Tensor, plan: AnglesPlan) -> Tensor:
    """What the model made, ``[1, T, C]`` or ``[T, C]``, as ``[T, R]`` with halves alike."""
    angles = angles[0] if angles.dim() == 3 else angles
    if plan.stride == 1 and plan.repeats:
        return angles
    return angles[:, :: plan.stride].repeat(1, 2)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, plan: RotationPlan) -> Tensor:
    """Heads ``[T, H, D]`` rotated by their tokens' angles ``[T, R]``."""
    return apply_rotary(heads, cos, sin, is_interleaved=plan.is_interleaved)
