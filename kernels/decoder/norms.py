"""Weights of a normalisation, and their struct for the compiled library."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from .structs import NormStruct


class NormKind(IntEnum):
    """Kind of a normalisation, with the values of ``kernels/native/layer_switches.h``.

    ``RMS`` rounds before it multiplies by the weight, ``WIDE_RMS`` only after, ``CENTRED`` subtracts the mean first.
    """

    NONE = 0
    RMS = 1
    WIDE_RMS = 2
    CENTRED = 3


@dataclass(frozen=True)
class NormWeights:
    """Weights of a normalisation.

    Args:
        weight: ``[E]``, or ``[H, D]`` for heads; float32 for a result that is rounded once.
        is_centred: subtract the mean first; the weight is float32 then.
        bias: as ``weight``, for a centred norm; None without.
    """

    weight: Tensor
    eps: float
    is_centred: bool = False
    bias: Tensor | None = None

    @property
    def is_wide(self) -> bool:
        """Whether the product with the weight is computed in float32."""
        return self.weight.dtype is torch.float32


def norm_struct(norm: NormWeights | None) -> NormStruct:
    if norm is None:
        return NormStruct(None, None, NormKind.NONE, 0.0)
    wide_or_plain = NormKind.WIDE_RMS if norm.is_wide else NormKind.RMS
    kind = NormKind.CENTRED if norm.is_centred else wide_or_plain
    return NormStruct(norm.weight.data_ptr(), address(norm.bias), kind, norm.eps)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
