"""A normalisation, as Python and as the compiled library have it."""

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
        return NormStruct(None, None, NormKind.NONE, 0.0)
    wide_or_plain = NormKind.WIDE_RMS if norm.is_wide else NormKind.RMS
    kind = NormKind.CENTRED if norm.is_centred else wide_or_plain
    return NormStruct(norm.weight.data_ptr(), address(norm.bias), kind, norm.eps)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
