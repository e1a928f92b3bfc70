"""The part of each linear layer of a whole model that a rank has, for tensors that are read after the model is cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from .groups import RankGroups, named_local_modules

_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class LayerShare:
    """The part of one linear layer: these inputs and outputs of the layer ``name`` of the whole model."""

    name: str
    inputs: slice
    outputs: slice


@dataclass(frozen=True)
class ModelShares:
    """The parts of a rank.

    Args:
        sizes: numbers of inputs and outputs of each linear layer of the whole model, by name.
        own: the part of each layer, by its name in the rank's module.
    """

    sizes: Mapping[str, tuple[int, int]]
    own: Mapping[str, LayerShare]

    def sizes_with(self, own_layers: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Return the sizes of these layers of the rank and of all layers of other stages, by name in the whole
        model.
        """
        names = {self.own[layer].name for layer in own_layers}
        of_rank = {share.name for share in self.own.values()}
        return {name: size for name, size in self.sizes.items() if name in names or name not in of_rank}


def linear_sizes(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the numbers of inputs and outputs of each linear layer, by name."""
    return {
        name: (linear.in_features, linear.out_features)
        for name, linear in named_local_modules(module)
        if isinstance(linear, nn.Linear)
    }


def shares_of(sizes: Mapping[str, tuple[int, int]], module: nn.Module, groups: RankGroups) -> ModelShares:
    """Return the parts that ``cut_decoder`` has left in ``module``.

    Args:
        sizes: result of ``linear_sizes`` before the cut.
    """
    num_layers = 1 + max((int(match[1]) for name in sizes if (match := _LAYER_NUMBER.search(name))), default=0)
    first_layer = groups.layout.stage_layers(groups.rank, num_layers).start
    own = {}
    for name, own_sizes in linear_sizes(module).items():
        whole_name = _LAYER_NUMBER.sub(lambda match: f".{int(match[1]) + first_layer}.", name, count=1)
        parts = [_part(whole, own, groups) for whole, own in zip(sizes[whole_name], own_sizes, strict=True)]
        own[name] = LayerShare(whole_name, *parts)
    return ModelShares(sizes, own)


def _part(whole: int, own: int, groups: RankGroups) -> slice:
    """Return the rank's part of ``own`` of ``whole`` inputs or outputs. With fewer parts than ranks, as of heads of
    keys, several ranks have the same part.
    """
    start = groups.tensor_rank * (whole // own) // groups.layout.tensor * own
    return slice(start, start + own)
