"""Modules of which each rank of a stage computes a part."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .groups import RankGroups


class SumOverRanks(nn.Module):
    """What ``inner`` makes, summed over the ranks of the stage: each has made a part of every number.

    Whatever is linear in its last weight can be so, a linear layer as well as a feed-forward part or the experts of
    one, with whatever gates are the same on all ranks.
    """

    def __init__(self, inner: nn.Module, groups: RankGroups) -> None:
        super().__init__()
        self.inner = inner
        self.groups = groups

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        # Some blocks of experts tell what their router has chosen, too.
        return (self.groups.all_reduce(out[0]), *out[1:]) if isinstance(out, tuple) else self.groups.all_reduce(out)


class ConcatOverRanks(nn.Module):
    """What ``inner`` makes, side by side over the ranks of the stage; only the first of them has it whole."""

    def __init__(self, inner: nn.Module, groups: RankGroups) -> None:
        super().__init__()
        self.inner = inner
        self.groups = groups

    def forward(self, inputs: Tensor) -> Tensor:
        return self.groups.gather(self.inner(inputs))
