"""The rotary embedding: angles as the model makes them, and heads rotated by them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .....kernels.rotary import apply_rotary
from ...plan import AnglesPlan, RotationPlan

# make(hidden, positions [T]): cosines and sines [T, R], by each of a model's ways, of the dtype and device of hidden.
MakeAngles = Callable[[Tensor, Tensor], list[tuple[Tensor, Tensor]]]


class AngleTable:
    """A ``MakeAngles`` whose angles of a position are the same bits in every step: all are made once.

    Torch computes cosines of many numbers at once by one function, and of those that are left by another.
    """

    def __init__(self, make: MakeAngles, num_positions: int) -> None:
        self._make = make
        self._num_positions = num_positions
        self._tables: list[tuple[Tensor, Tensor]] = []

    def __call__(self, hidden: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        if not self._tables:
            self._tables = self._make(hidden, torch.arange(self._num_positions, device=positions.device))
        return [(cos[positions], sin[positions]) for cos, sin in self._tables]


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
