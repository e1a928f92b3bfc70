"""Models in which a part is another one, on the weights that they have."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TypeVar

from torch import nn

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def with_parts(module: AnyModule, parts: Mapping[str, nn.Module]) -> AnyModule:
    """A copy of ``module`` that has other modules under these names, and shares all that it has else."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    for name, part in parts.items():
        first, _, rest = name.partition(".")
        inner = made._modules[first]
        assert inner is not None
        made._modules[first] = with_parts(inner, {rest: part}) if rest else part
    return made
