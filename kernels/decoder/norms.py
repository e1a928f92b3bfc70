"""A normalisation, as Python and as the compiled library have it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .structs import NormStruct


@dataclass(frozen=True)
class NormWeights:
    """A normalisation.

    Args:
        weight: ``[E]``, or ``[H, D]`` for heads; in float32 where the result is rounded once.
        is_centred: the mean is taken off first; the weight is in float32 then.
        bias: as ``weight``, of a centred one.
    """

    weight: Tensor
    eps: float
    is_centred: bool = False
    bias: Tensor | None = None

    @property
    def is_wide(self) -> bool:
        return self.weight.dtype is torch.float32


def norm_struct(norm: NormWeights | None) -> NormStruct:
    if norm is None:
        return NormStruct(None, None, 0, 0.0)
    kind = 3 if norm.is_centred else 2 if norm.is_wide else 1
    return NormStruct(norm.weight.data_ptr(), address(norm.bias), kind, norm.eps)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
