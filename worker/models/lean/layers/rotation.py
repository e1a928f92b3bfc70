"""The rotary embedding: angles computed by the model's own code, and the rotation of heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .....kernels.rotary import apply_rotary
from ...plan import AnglesPlan, RotationPlan

# make(hidden, positions [T]): cosines and sines [T, R] for each kind of angles, in dtype and on device of hidden.
MakeAngles = Callable[[Tensor, Tensor], list[tuple[Tensor, Tensor]]]


class AngleTable:
    """A ``MakeAngles`` whose angles of a position have the same bits in every step, because all are computed once.

    Torch computes cosines of many numbers by a vectorised function, and of the remaining ones by another.
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
    """Return cosines and sines ``[T, R]`` of ``positions`` by the model's own code, with two equal halves.

    Args:
        hidden: a tensor with the dtype and device of the result.
    """
    cos, sin = module(hidden, positions[None], *plan.arguments, **dict(plan.options))
    return as_halves(cos, plan), as_halves(sin, plan)


def as_halves(angles: Tensor, plan: AnglesPlan) -> Tensor:
    """Convert the model's angles, ``[1, T, C]`` or ``[T, C]``, to ``[T, R]`` with two equal halves."""
    angles = angles[0] if angles.dim() == 3 else angles
    if plan.stride == 1 and plan.repeats:
        return angles
    return angles[:, :: plan.stride].repeat(1, 2)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, plan: RotationPlan) -> Tensor:
    """Rotate heads ``[T, H, D]`` by their tokens' angles ``[T, R]``."""
    return apply_rotary(heads, cos, sin, is_interleaved=plan.is_interleaved)
