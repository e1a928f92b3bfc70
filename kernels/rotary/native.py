"""In C++, for the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import library
from . import reference


def apply_rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``rotary.apply_rotary``."""
    function = library("rotary", heads.dtype)
    if function is None or heads.stride(2) != 1 or not (cos.is_contiguous() and sin.is_contiguous()):
        return reference.apply_rotary(heads, cos, sin)
    out = torch.empty(heads.shape, dtype=heads.dtype)
    function(
        *(heads.data_ptr(), heads.stride(0), heads.stride(1), cos.data_ptr(), sin.data_ptr(), out.data_ptr()),
        *heads.shape,
    )
    return out
