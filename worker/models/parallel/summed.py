"""Modules of which each rank of a stage computes a part."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .groups import RankGroups


class SumOverRanks(nn.Module):
    """The sum of the outputs of ``inner`` over the ranks of the stage, each of which computes a summand.

    This works for any module that is linear in its last weight: a linear layer, a feed-forward part, or its experts,
    with any gates that are the same on all ranks.
    """

    def __init__(self, inner: nn.Module, groups: RankGroups) -> None:
        super().__init__()
        self.inner = inner
        self.groups = groups

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        # Some blocks of experts also return the choices of their router.
        return (self.groups.all_reduce(out[0]), *out[1:]) if isinstance(out, tuple) else self.groups.all_reduce(out)


class ConcatOverRanks(nn.Module):
    """The concatenated outputs of ``inner`` over the ranks of the stage; complete only at the first rank."""

    def __init__(self, inner: nn.Module, groups: RankGroups) -> None:
        super().__init__()
        self.inner = inner
        self.groups = groups

    def forward(self, inputs: Tensor) -> Tensor:
        return self.groups.gather(self.inner(inputs))
